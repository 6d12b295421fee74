"""Sweeps: many parallel configurations judged against shared references."""
