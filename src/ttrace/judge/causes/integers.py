"""Wrong integers, recognised by how they differ.

Like the tests of judge/causes/reductions.py, each is a function from the evidence to a cause or None.
"""

from __future__ import annotations

import torch

from ttrace.judge.causes.evidence import Evidence
from ttrace.judge.verdict import Cause, CauseName


def offset(e: Evidence) -> Cause | None:
    """Integers that are the reference's plus one number, on each rank its own: positions that begin elsewhere."""
    pair = e.tensors if not e.reference.dtype.is_floating_point and e.reference.dtype != torch.bool else None
    if pair is None:
        return None
    surplus = (pair[1] - pair[0]).round()
    shifts: dict[int, set[int]] = {}
    for piece in e.candidate.pieces:
        values = piece.region.take(surplus)
        if not values.numel():
            continue
        by = int(values.flatten()[0])
        if values.numel() < 2 or bool((values != by).any()):
            return None
        shifts.setdefault(by, set()).update(piece.ranks)
    right = shifts.pop(0, set())
    named = [f"{_who(ranks, alone=not right and len(shifts) == 1)}: reference {by:+d}" for by, ranks in shifts.items()]
    words = ", ".join(named).replace("reference +", "reference + ").replace("reference -", "reference - ")
    return Cause(CauseName.OFFSET, f"integers differ by a constant; {words}")


def _who(ranks: set[int], *, alone: bool) -> str:
    return "all ranks" if alone else f"rank {', '.join(map(str, sorted(ranks)))}"
