"""Tolerances: the error that rounding explains, estimated from the twins."""
