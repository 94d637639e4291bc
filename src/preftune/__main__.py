"""`python -m preftune`."""

from preftune.cli import main

main()
