"""This folder holds numbers: made from a name, measured in one pass."""
