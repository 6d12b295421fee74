"""Report of one tensor's difference: by rank, and the elements that differ most."""

from __future__ import annotations

import shlex
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ttrace.judge.tensors.difference import Difference
from ttrace.report.layout_source import describe_provenance
from ttrace.report.numbers import keep_finite


def as_json(difference: Difference) -> dict[str, Any]:
    return {
        "id": str(difference.id),
        "shape": difference.shape,
        "layout": difference.layout,
        "by": describe_provenance(difference.by),
        "pending": list(difference.pending),
        "factor": difference.factor,
        "error": keep_finite(difference.total.error),
        "scale": keep_finite(difference.total.scale),
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
    total = difference.total
    what = f"summed over {', '.join(difference.pending)}, " if difference.pending else ""
    if difference.factor != 1.0:
        what += f"times the factor {difference.factor:g} of a later reduction, "
    return Text.assemble(
        (str(difference.id), "bold"),
        f"  shape {list(difference.shape)}\n",
        f'layout "{difference.layout}", {describe_provenance(difference.by)}\n',
        f"{what}error {total.error:.2e}, best fit: candidate = {total.scale:.6g} x reference",
    )
