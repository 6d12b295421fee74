"""Bytes, files and object stores below the trace format."""
