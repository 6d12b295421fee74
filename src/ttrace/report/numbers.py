"""Numbers as JSON can hold them."""

from __future__ import annotations

import math


def keep_finite(value: float | None) -> float | None:
    """Return the value, or None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None
