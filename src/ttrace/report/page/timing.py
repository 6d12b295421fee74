"""Durations of a run's commands, from the times of the files that they wrote.

A plan is written when its command starts, and a rank's end when its last traced step is over.
"""

from __future__ import annotations

from pathlib import Path

from ttrace.trace.format import END

_PLAN = ".plan.json"


def measure_stages(folder: Path) -> dict[str, float]:
    """Measure the seconds of each stage that ended, in the order in which they ran."""
    durations: dict[str, tuple[float, float]] = {}
    for place in (folder, folder / "isolated"):
        for plan in place.glob(f"*{_PLAN}"):
            trace = place / plan.name.removesuffix(_PLAN)
            try:
                start = plan.stat().st_mtime
                end = max((path.stat().st_mtime for path in trace.glob(f"rank-*/{END}")), default=0.0)
            except OSError:  # such as a circle of links: an unknown duration must not stop the report
                continue
            if end > start:
                name = trace.name if place == folder else f"{place.name} {trace.name}"
                durations[name] = start, end - start
    return {name: seconds for name, (_, seconds) in sorted(durations.items(), key=lambda item: item[1])}
