"""Fingerprints of files, which show whether a file has changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from ttrace.files import open_regular


def fingerprint_file(path: Path) -> str:
    """Return a text that differs as soon as the file's content does; empty for a file that cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except (OSError, ValueError):  # a name may be too long, or have a zero in it
        return ""


def find_changed_file(fingerprints: Mapping[str, str]) -> str | None:
    """Find the first file that has changed."""
    return next((path for path, old in fingerprints.items() if fingerprint_file(Path(path)) != old), None)
