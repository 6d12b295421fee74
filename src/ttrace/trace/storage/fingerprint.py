"""Fingerprints of files, which show whether a file has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path


def fingerprint_file(path: Path) -> str:
    """Return a text that differs as soon as the file's content does; empty for a file that cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def find_changed_file(fingerprints: Mapping[str, str]) -> str | None:
    """Find the first file that has changed."""
    return next((path for path, old in fingerprints.items() if fingerprint_file(Path(path)) != old), None)
