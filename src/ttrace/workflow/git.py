"""The commit that is checked out."""

from __future__ import annotations

import subprocess
from pathlib import Path


def describe_commit(folder: Path) -> str:
    """Return the commit, with a plus if files differ from it; an empty text where there is none."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return f"{commit}+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
