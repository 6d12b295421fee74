"""Hugging Face transformers: layouts that a model's own parallel plans state."""
