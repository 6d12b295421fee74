"""Layouts: splits, the notation, rules and inference, from an annotation to a region."""
