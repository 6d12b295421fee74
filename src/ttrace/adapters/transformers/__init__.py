"""Hugging Face transformers: layouts from a model's own parallel plans."""
