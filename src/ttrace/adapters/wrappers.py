"""This module knows the wrappers that put a level between a model and its name."""

from __future__ import annotations

from ttrace.tensors.ids import ROOT

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
"""Attributes under which wrappers keep what they wrap."""


def canonical(path: str) -> str:
    """The path without wrappers; `.` for the model itself."""
    parts = [part for part in path.split(".") if part and part not in WRAPPERS]
    return ".".join(parts) or ROOT
