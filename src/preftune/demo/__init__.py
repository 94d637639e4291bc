"""The main job on real input: a small model, human ratings, and what changed."""
