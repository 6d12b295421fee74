"""This package is the command line."""

from ttrace.cli.commands import app, main

__all__ = ["app", "main"]
