"""Ports: two implementations of one model, whose modules, parameters and dims correspond as a map says."""
