"""One bug per file: its description, its tier, how to trigger it, how to avoid it, and what must be found."""
