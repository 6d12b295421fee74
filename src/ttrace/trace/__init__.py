"""Traces: what a run leaves on disk, its format, its writer and its reader."""
