"""Environment variables that make every Python process of a command load the hook of automatic attachment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

HOOK = Path(__file__).parent / "hook"
MARK_VARIABLE = "TTRACE_HOOKED"
"""The variable with the path of a file that the hook creates; without the file, the hook was not loaded."""


def make_variables(environment: Mapping[str, str], mark: Path) -> dict[str, str]:
    """Make the variables to add to this environment of a command."""
    before = environment.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": os.pathsep.join([str(HOOK), *([before] if before else [])]),
        MARK_VARIABLE: str(mark),
    }
