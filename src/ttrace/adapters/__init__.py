"""This folder holds what must be known of each framework: mesh, names, layouts, microbatches, state."""
