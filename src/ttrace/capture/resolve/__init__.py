"""Answers to what a live tensor is: its name in the reference, its layout, and what the model consists of."""
