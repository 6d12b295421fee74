"""Time limits that only a process that hangs reaches, however busy the machine is."""

from __future__ import annotations

HANG = 1800.0
"""After so many seconds, a process that has not ended is taken to hang. Bars on speed are in `bench`."""
