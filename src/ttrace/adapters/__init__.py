"""Adapters: what must be known of each framework, such as its mesh, names, layouts, microbatches and state."""
