"""Checkpoint files: reading common formats, and comparing two checkpoints."""
