"""This module tells what a check is worth: by kind for people, tensor by tensor for programs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ttrace.judge.power import INJECTIONS, Power, SelfTest
from ttrace.tensors.ids import Kind

_MOST_SHOWN = 5


def as_json(found: SelfTest) -> dict[str, Any]:
    return {
        "exit": int(found.exit),
        "without_power": dict(found.unprotected),
        "tensors": [_tensor(power) for power in found.powers],
    }


def show(console: Console, found: SelfTest) -> None:
    """Print a table by kind, then what protects nothing."""
    console.print(_table(found.powers))
    blind = [power for power in found.powers if not power.protects]
    for reason, count in Counter(power.reason if not power.is_judged else "" for power in blind).most_common():
        named = [str(p.comparison.id) for p in blind if (p.reason if not p.is_judged else "") == reason]
        words = reason or "the tolerance is so wide that a lost shard passes"
        more = f" and {count - 2} more" if count > 2 else ""
        console.print(Text(f"{count} protect nothing ({', '.join(named[:2])}{more}): {words}", "dim"), soft_wrap=True)
    for name, words in list(found.unprotected.items())[:_MOST_SHOWN]:
        console.print(Text.assemble(("? ", "bold yellow"), f"no power over {name}: {words}"), soft_wrap=True)
    if len(found.unprotected) > _MOST_SHOWN:
        console.print(Text(f"... and {len(found.unprotected) - _MOST_SHOWN} further parameters", "dim"))
    if not found.unprotected:
        console.print(Text("✓ the check has power over every parameter", "bold green"))


def _table(powers: Sequence[Power]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("kind", "tensors", "judged", "smallest error seen", "in the worst", *INJECTIONS):
        table.add_column(name, justify="left" if name == "kind" else "right", overflow="fold")
    for kind in Kind:
        mine = [power for power in powers if power.comparison.id.kind is kind]
        if mine:
            table.add_row(kind.value, *_cells(mine))
    return table


def _cells(powers: Sequence[Power]) -> list[str]:
    errors = [power.error for power in powers if power.error is not None]
    seen = [Counter(power.seen[name] for power in powers if name in power.seen) for name in INJECTIONS]
    return [
        str(len(powers)),
        str(len(errors)),
        f"{statistics.median(errors):.1e}" if errors else "-",
        f"{max(errors):.1e}" if errors else "-",
        *(f"{counts[True]}/{counts.total()}" if counts else "-" for counts in seen),
    ]


def _tensor(power: Power) -> dict[str, Any]:
    return {
        "id": str(power.comparison.id),
        "protects": power.protects,
        "reason": "" if power.protects else power.reason,
        "error": _number(power.error),
        "scale": _number(power.scale),
        "seen": dict(power.seen),
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
