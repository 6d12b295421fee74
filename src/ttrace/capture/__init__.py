"""This folder is the run time: it looks at live tensors, or replaces them."""
