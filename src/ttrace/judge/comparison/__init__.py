"""Comparison of one tensor of the candidate with the reference's."""
