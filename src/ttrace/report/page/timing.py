"""This module says how long each of a run's commands took, from the times of the files they left.

A plan is written when its command starts, and a rank's end when its last traced step is over.
"""

from __future__ import annotations

from pathlib import Path

from ttrace.trace.format import END

_PLAN = ".plan.json"


def measure_stages(folder: Path) -> dict[str, float]:
    """Seconds by stage, in the order in which they ran; without those that never ended."""
    found: dict[str, tuple[float, float]] = {}
    for place in (folder, folder / "isolated"):
        for plan in place.glob(f"*{_PLAN}"):
            trace = place / plan.name.removesuffix(_PLAN)
            try:
                start = plan.stat().st_mtime
                end = max((path.stat().st_mtime for path in trace.glob(f"rank-*/{END}")), default=0.0)
            except OSError:  # links in a circle, for instance: how long it took is no reason to end
                continue
            if end > start:
                name = trace.name if place == folder else f"{place.name} {trace.name}"
                found[name] = start, end - start
    return {name: seconds for name, (_, seconds) in sorted(found.items(), key=lambda item: item[1])}
