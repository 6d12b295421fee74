"""The margin of a tolerance, in a module of its own that imports no torch: the commands' help shows it."""

from __future__ import annotations

MARGIN = 4.0
"""How many times the rounding error that the twins show is tolerated."""
