"""Scripts of frameworks around plain torch, checked as they are: `python -m zoo frameworks`."""
