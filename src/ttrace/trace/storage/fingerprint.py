"""This module says whether files are what they were."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path


def fingerprint_file(path: Path) -> str:
    """Differs as soon as the file's content does; empty for what cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def find_changed_file(fingerprints: Mapping[str, str]) -> str | None:
    """The first file that is no longer what it was."""
    return next((path for path, old in fingerprints.items() if fingerprint_file(Path(path)) != old), None)
