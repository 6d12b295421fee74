"""The margin of a tolerance, in a module of its own that imports no torch: the commands' help shows it."""

from __future__ import annotations

MARGIN = 4.0
"""How many times the rounding error that the twins show is tolerated.

Of 434,637 tensors of clean runs, the largest ratio of observed to estimated error was 3.00
(docs/explanation/tolerance.md).
"""
