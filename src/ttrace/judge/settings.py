"""This module says in what the two sides' optimizers were told something else."""

from __future__ import annotations

from ttrace.trace.reader import Trace


def other_settings(reference: Trace, candidate: Trace) -> str:
    """In words, the settings that only one side has; empty if there are none, or a side says nothing."""
    ours, theirs = reference.settings, candidate.settings
    different = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    return ", ".join(
        f"{name} {' and '.join(sorted(theirs[name]))} instead of {' and '.join(sorted(ours[name]))}"
        for name in different
    )
