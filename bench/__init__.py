"""One script per performance bar: `python -m bench NAME` prints the result last."""
