"""Notes of a check: facts that explain a verdict but do not change it."""
