"""This package is the command line."""

from __future__ import annotations

from typing import Any

from ttrace.cli.entry import main

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    """Import the commands when they are asked for: `main` must be there to tell if they cannot be imported."""
    if name == "app":
        from ttrace.cli.commands import app

        return app
    raise AttributeError(name)
