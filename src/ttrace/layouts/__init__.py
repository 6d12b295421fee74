"""This folder goes from an annotation to a region: splits, the layout notation, rules, inference."""
