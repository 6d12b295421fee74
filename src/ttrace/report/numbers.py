"""Numbers as JSON can hold them, and as people read them."""

from __future__ import annotations

import math


def keep_finite(value: float | None) -> float | None:
    """Return the value, or None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes for people: `1.7 MB`."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{num_bytes} B"
