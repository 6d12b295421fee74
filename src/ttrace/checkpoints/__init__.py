"""Checkpoints at rest: reading the formats that people have, and comparing two of them."""
