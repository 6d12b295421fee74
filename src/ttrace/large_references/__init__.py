"""References that do not fit into the memory of one device: streamed, or divided over a pipeline."""
