"""Ports: two implementations of one model, and maps between their modules, parameters and dims."""
