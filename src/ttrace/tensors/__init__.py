"""Names of logical tensors, and the parts of them that ranks hold: pure values."""
