"""Hostile inputs for everything that reads a file or a text: `python -m fuzz TARGET` prints its figure last."""
