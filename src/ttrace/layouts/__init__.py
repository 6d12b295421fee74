"""Layouts: from an annotation, by a rule or by inference, to the region of a tensor that a rank holds."""
