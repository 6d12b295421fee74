"""Causes of a wrong tensor, and the evidence that shows each of them."""
