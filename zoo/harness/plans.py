"""Plans of the zoo: in full, or as sketches if an environment variable, which ranks inherit, asks for them."""

from __future__ import annotations

import os
from typing import Any

from ttrace.capture.plan import Plan

SKETCH = "TTRACE_ZOO_SKETCH"
"""The variable that asks for sketches of so many numbers."""
FULL = "TTRACE_ZOO_FULL"
"""Sites that are recorded in full nevertheless, separated by commas."""


def planned(**settings: Any) -> Plan:
    """Return a plan after which the script continues."""
    num_buckets = os.environ.get(SKETCH)
    sketched: dict[str, Any] = {"record": "sketch", "num_buckets": int(num_buckets)} if num_buckets else {}
    if full := os.environ.get(FULL):
        sketched["full"] = tuple(full.split(","))
    return Plan.model_validate({"stop": False, **sketched, **settings})
