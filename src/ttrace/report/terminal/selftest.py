"""Report of a selftest: a table by kind for people, every tensor for programs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ttrace.judge.selftest import INJECTIONS, Power, SelfTest
from ttrace.layouts.ids import Kind
from ttrace.report.facts import WEAKNESSES, keep_finite

_MOST_SHOWN = 5
_SHORT = ("x 1.01", "x 1.001", "lost", "swapped", "row", "other mb")
"""Short names of the faults, in the order of INJECTIONS: the table has to fit a terminal."""
_LEGEND = (
    "median and worst: the smallest relative error that the check would find. Then, in how many tensors it would find\n"
    "a factor of 1.01 or 1.001, a lost shard, swapped chunks, a row of zeros, the values of another microbatch."
)


def as_json(found: SelfTest) -> dict[str, Any]:
    return {
        "exit": int(found.exit),
        "without_power": {name: WEAKNESSES[weakness] for name, weakness in found.unprotected.items()},
        "tensors": [_describe_tensor(power) for power in found.powers],
    }


def show(console: Console, found: SelfTest) -> None:
    """Print a table by kind with the smallest error that the check sees, then what it does not protect."""
    console.print(Text(_LEGEND, "dim"), soft_wrap=True)
    console.print(_make_table(found.powers))
    blind: dict[str, list[str]] = {}
    for power in found.powers:
        if not power.protects:
            blind.setdefault(power.reason, []).append(str(power.comparison.id))
    for reason, ids in blind.items():
        more = f" and {len(ids) - 2} more" if len(ids) > 2 else ""
        console.print(Text(f"protects nothing: {', '.join(ids[:2])}{more}: {reason}", "dim"), soft_wrap=True)
    for name, weakness in list(found.unprotected.items())[:_MOST_SHOWN]:
        words = f"not tested: {name} ({WEAKNESSES[weakness]})"
        console.print(Text.assemble(("? ", "bold yellow"), words), soft_wrap=True)
    if len(found.unprotected) > _MOST_SHOWN:
        console.print(Text(f"... and {len(found.unprotected) - _MOST_SHOWN} further parameters", "dim"))
    if not found.unprotected:
        console.print(Text("✓ a fault in any parameter would have been found", "bold green"))


def _make_table(powers: Sequence[Power]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("kind", "tensors", "judged", "median", "worst", *_SHORT):
        table.add_column(name, justify="left" if name == "kind" else "right", overflow="fold")
    for kind in Kind:
        mine = [power for power in powers if power.comparison.id.kind is kind]
        if mine:
            table.add_row(kind.value, *_make_cells(mine))
    return table


def _make_cells(powers: Sequence[Power]) -> list[str]:
    errors = [power.error for power in powers if power.error is not None]
    seen = [Counter(power.seen[name] for power in powers if name in power.seen) for name in INJECTIONS]
    return [
        str(len(powers)),
        str(len(errors)),
        f"{statistics.median(errors):.1e}" if errors else "-",
        f"{max(errors):.1e}" if errors else "-",
        *(f"{counts[True]}/{counts.total()}" if counts else "-" for counts in seen),
    ]


def _describe_tensor(power: Power) -> dict[str, Any]:
    return {
        "id": str(power.comparison.id),
        "protects": power.protects,
        "reason": "" if power.protects else power.reason,
        "error": keep_finite(power.error),
        "scale": keep_finite(power.scale),
        "seen": dict(power.seen),
    }
