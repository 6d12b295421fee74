"""The words for indices along a dim of a wrong tensor: which they are, or which ranks hold them."""

from __future__ import annotations

import torch

from ttrace.judge.causes.evidence import Evidence
from ttrace.judge.tensors.rank_names import name_by_axis

_MOST_SPANS = 4
"""Of more runs of neighbours nobody reads the numbers."""


def name_indices(e: Evidence, dim: int, indices: torch.Tensor) -> str:
    """The indices as spans; where those are many, how many there are and which ranks hold them."""
    spans = _find_spans(indices)
    if len(spans) <= _MOST_SPANS:
        return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    numbers = indices.unique()
    who = name_holders(e, dim, numbers)
    return f"{len(numbers)} between {int(numbers[0])} and {int(numbers[-1])}{f', of {who}' if who else ''}"


def name_holders(e: Evidence, dim: int, indices: torch.Tensor) -> str:
    """The ranks that hold these indices; empty if all ranks do, or if ranks hold no ranges of indices."""
    if any(piece.region.flat is not None for piece in e.candidate.pieces):
        return ""
    wanted, everybody, holders = set(indices.tolist()), set[int](), set[int]()
    for piece in e.candidate.pieces:
        everybody.update(piece.ranks)
        if any(index in wanted for start, stop in piece.region.dims[dim] for index in range(start, stop)):
            holders.update(piece.ranks)
    return name_by_axis(holders, everybody, e.mesh)[0] if holders < everybody else ""


def _find_spans(indices: torch.Tensor) -> list[tuple[int, int]]:
    """Runs of neighbours, each with its first and last."""
    spans: list[tuple[int, int]] = []
    for index in indices.tolist():
        if spans and index == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], index)
        else:
            spans.append((index, index))
    return spans
