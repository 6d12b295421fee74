"""The command line."""

from __future__ import annotations

from typing import Any

from ttrace.cli.entry import main

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    """Import the commands on first use: `main` must be there to report it if they cannot be imported."""
    if name == "app":
        from ttrace.cli.entry import app

        return app
    raise AttributeError(name)
