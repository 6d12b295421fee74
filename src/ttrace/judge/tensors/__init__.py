"""Logical tensors and their shards, as a comparison reads them."""
