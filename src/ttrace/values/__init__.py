"""Values of tensors: generated from a name, measured in one pass."""
