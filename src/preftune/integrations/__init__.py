"""Parts of preftune inside other people's trainers."""
