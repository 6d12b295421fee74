"""Run time: looks at live tensors, or replaces them."""
