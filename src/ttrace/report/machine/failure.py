"""Report of a command that could not judge anything, in a module that imports no torch: that may be what failed."""

from __future__ import annotations

from typing import Any

SCHEMA = 1
"""The version of the JSON report's form."""
_UNJUDGED = 2


def make_failure_report(message: str) -> dict[str, Any]:
    """Make a JSON report, in the form of every other one, whose only content is a problem."""
    return {
        "schema": SCHEMA,
        "exit": _UNJUDGED,
        "counts": {},
        "findings": [],
        "problems": [message],
        "notes": [],
        "next": "",
        "tensors": [],
    }
