"""Processes of a machine with faults, started in milliseconds: they are forked from one that has imported torch."""
