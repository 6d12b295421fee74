"""Automatic attachment: the training step is found in a script that does not mention TTrace."""
