"""Results of comparing two checkpoints, for people and for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from ttrace.checkpoints.comparison import CheckpointComparison, Sameness
from ttrace.judge.verdict import CauseName

_MOST_LISTED = 40


def show(console: Console, found: CheckpointComparison) -> None:
    """Print what differs, and how much does not."""
    counts = {sameness: number for sameness, number in found.counts.items() if number}
    if found.is_same:
        lines = ["✓ both checkpoints hold the same values"]
    else:
        lines = [f"✗ {len(found.differences)} differ"]
        width = max(len(each.name) for each in found.differences[:_MOST_LISTED])
        for each in found.differences[:_MOST_LISTED]:
            named = f"{each.cause.value}: " if each.cause not in (None, CauseName.UNEXPLAINED) else ""
            lines.append(f"  {each.name:{width}}  {named}{each.sentence}")
        if len(found.differences) > _MOST_LISTED:
            lines.append(f"  and {len(found.differences) - _MOST_LISTED} more; --json lists all")
    lines.append(f"tensors: {', '.join(f'{number} {sameness}' for sameness, number in counts.items()) or 'none'}")
    lines += [f"note: {note}" for note in found.notes]
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def as_json(found: CheckpointComparison) -> dict[str, Any]:
    """Give everything that was found, ready for JSON."""
    return {
        "same": found.is_same,
        "tensors": {sameness.value: found.counts.get(sameness, 0) for sameness in Sameness},
        "differences": [
            {
                "name": each.name,
                "what": each.sameness.value,
                "cause": None if each.cause is None else each.cause.value,
                "sentence": each.sentence,
                "region": [list(bounds) for bounds in each.region],
                "shape": list(each.shape),
            }
            for each in found.differences
        ],
        "notes": list(found.notes),
    }
