"""Report of one tensor's difference: by rank, and the elements that differ most."""

from __future__ import annotations

import shlex
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ttrace.judge.tensors.difference import Difference
from ttrace.report.facts import describe_provenance, keep_finite
from ttrace.values.stats import Stats


def as_json(difference: Difference) -> dict[str, Any]:
    worst = difference.worst
    return {
        "id": str(difference.id),
        "shape": difference.shape,
        "layout": difference.layout,
        "by": describe_provenance(difference.by),
        "pending": list(difference.pending),
        "factor": difference.factor,
        "error": keep_finite(difference.total.error),
        "scale": keep_finite(difference.total.scale),
        "where": difference.replicas[0].where,
        "worst_replica": worst
        and {
            "where": worst.where,
            "error": keep_finite(worst.stats.error),
            "scale": keep_finite(worst.stats.scale),
        },
        "ranks": [
            {
                "where": rank.where,
                "region": rank.region,
                "error": keep_finite(rank.stats.error),
                "scale": keep_finite(rank.stats.scale),
            }
            for rank in difference.ranks
        ],
        "elements": [
            {
                "index": element.index,
                "reference": keep_finite(element.reference),
                "candidate": keep_finite(element.candidate),
                "where": element.where,
            }
            for element in difference.elements
        ],
    }


def show(console: Console, difference: Difference, folder: str) -> None:
    """Print the difference as two small tables."""
    console.print(_make_head(difference), soft_wrap=True)
    ranks = Table("where", "holds", "error", "scale", box=None, header_style="dim", pad_edge=False)
    for rank in difference.ranks:
        ranks.add_row(rank.where, Text(rank.region), f"{rank.stats.error:.2e}", f"{rank.stats.scale:.6g}")
    worst = Table("element", "reference", "candidate", "where", box=None, header_style="dim", pad_edge=False)
    for element in difference.elements:
        worst.add_row(str(element.index), f"{element.reference:.6g}", f"{element.candidate:.6g}", element.where)
    console.print("", ranks, "", Text("largest differences:", "dim"), worst, sep="\n")
    command = f"ttrace explain {shlex.quote(folder)} {shlex.quote(str(difference.id))}"
    console.print(Text(f"next: {command}"), soft_wrap=True)


def _make_head(difference: Difference) -> Text:
    what = f"summed over {', '.join(difference.pending)}, " if difference.pending else ""
    if difference.factor != 1.0:
        what += f"times the factor {difference.factor:g} of a later reduction, "
    return Text.assemble(
        (str(difference.id), "bold"),
        f"  shape {list(difference.shape)}\n",
        f'layout "{difference.layout}", {describe_provenance(difference.by)}\n',
        f"{what}{_describe_replicas(difference)}",
    )


def _describe_replicas(difference: Difference) -> str:
    """Describe the whole tensor: of replicas that differ the first and the worst, each with who holds it."""
    first, worst = difference.replicas[0], difference.worst
    if worst is None:
        return _describe_stats(first.stats)
    which = "worst" if worst == first else "first"
    words = f"{_describe_stats(first.stats)} ({first.where}, the {which} of {len(difference.replicas)} replicas)"
    return words if worst == first else f"{words}\nworst replica: {_describe_stats(worst.stats)} ({worst.where})"


def _describe_stats(stats: Stats) -> str:
    return f"error {stats.error:.2e}, best fit: candidate = {stats.scale:.6g} x reference"
