"""This module shows one id's difference: by rank, and the elements that differ most."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from ttrace.judge.difference import Difference


def as_json(difference: Difference) -> dict[str, Any]:
    return {
        "id": str(difference.id),
        "shape": difference.shape,
        "layout": difference.layout,
        "by": difference.by,
        "pending": list(difference.pending),
        "error": _number(difference.total.error),
        "scale": _number(difference.total.scale),
        "ranks": [
            {
                "where": rank.where,
                "region": rank.region,
                "error": _number(rank.stats.error),
                "scale": _number(rank.stats.scale),
            }
            for rank in difference.ranks
        ],
        "elements": [
            {
                "index": element.index,
                "reference": _number(element.reference),
                "candidate": _number(element.candidate),
                "where": element.where,
            }
            for element in difference.elements
        ],
    }


def show(console: Console, difference: Difference, folder: str) -> None:
    """Print the difference as two small tables."""
    total = difference.total
    console.print(f"[bold]{difference.id}[/]  shape {list(difference.shape)}", highlight=False)
    console.print(f'layout "{difference.layout}", {difference.by}', highlight=False, markup=False, soft_wrap=True)
    what = f"summed over {', '.join(difference.pending)}, " if difference.pending else ""
    console.print(f"{what}error {total.error:.2e}, candidate = {total.scale:.6g} x reference along it", highlight=False)
    ranks = Table("where", "holds", "error", "scale", box=None, header_style="dim", pad_edge=False)
    for rank in difference.ranks:
        ranks.add_row(rank.where, rank.region.replace("[", r"\["), f"{rank.stats.error:.2e}", f"{rank.stats.scale:.6g}")
    console.print("", ranks, "")
    worst = Table("element", "reference", "candidate", "where", box=None, header_style="dim", pad_edge=False)
    for element in difference.elements:
        worst.add_row(str(element.index), f"{element.reference:.6g}", f"{element.candidate:.6g}", element.where)
    console.print(worst)
    console.print(f"next: ttrace show {folder} {difference.id}", highlight=False, markup=False, soft_wrap=True)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
