"""One bug a file: its story, its tier, how to have it, how not to have it, and what must be found."""
