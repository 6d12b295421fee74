"""The ledger of collectives as rows: what ran in which module, over which ranks, how often, and from which line."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

from ttrace.errors import TTraceError
from ttrace.layouts.ids import is_inside
from ttrace.report.facts import format_bytes, shorten_place
from ttrace.trace.collectives import Collective
from ttrace.trace.reader import Trace

Row = dict[str, Any]
_NO_MODULE = "(no module)"


def list_collectives(candidate: Trace, module: str = "") -> list[Row]:
    """List what the ranks issued, in order: alike ones together, all or those of the modules that a name or glob means.

    `times` is how often a rank issued it, and `ranks` how many ranks did.
    """
    found: dict[tuple[Any, ...], dict[int, int]] = {}
    examples: dict[tuple[Any, ...], Collective] = {}
    for rank in candidate.ranks:
        for one in rank.collectives:
            if module and not (is_inside(one.module, module) or fnmatch.fnmatchcase(one.module, module)):
                continue
            size = None if one.is_message else one.shape
            key = (one.module, one.phase, one.op, one.reduction, one.group, size, one.dtype, one.source)
            examples.setdefault(key, one)
            counts = found.setdefault(key, {})
            counts[rank.manifest.rank] = counts.get(rank.manifest.rank, 0) + 1
    return [_make_row(examples[key], counts) for key, counts in found.items()]


def check_found(rows: list[Row], folder: Path, module: str) -> None:
    """Refuse to show an empty list, and explain why it is empty."""
    if rows:
        return
    if module:
        raise TTraceError(
            f"{folder} has no collective in {module!r}. `ttrace show {folder} --collectives` lists all of them."
        )
    raise TTraceError(f"{folder} has no collective: in the traced steps, its ranks communicated nothing.")


def _make_row(one: Collective, counts: dict[int, int]) -> Row:
    return {
        "module": one.module or _NO_MODULE,
        "phase": one.phase.value,
        "operation": f"{one.op} ({one.reduction})" if one.reduction else one.op,
        "over": str(one.group),
        "shape": one.shape,
        "dtype": one.dtype,
        "size": format_bytes(one.num_bytes),
        "times": max(counts.values()),
        "ranks": len(counts),
        "issued by": one.issuer or "the script",
        "at": shorten_place(one.source),
    }
