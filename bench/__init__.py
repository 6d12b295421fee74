"""This folder holds one script per performance bar: `python -m bench NAME` prints the figure last."""
