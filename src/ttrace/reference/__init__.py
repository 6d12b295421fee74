"""References that do not fit into memory: streamed, or as a pipeline."""
