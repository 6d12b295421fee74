"""Comparison of two tensors, or sums of tensors, of which some elements may be left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ttrace.values.chunks import Bounds, cut_chunks
from ttrace.values.kernels.pair import Term
from ttrace.values.stats import Stats, measure_difference, measure_sums

FindLost = Callable[[Bounds], torch.Tensor]
"""Marks the elements of a chunk that are left out."""


def compare_sums(xs: Sequence[Term], ys: Sequence[Term], find_lost: FindLost | None = None) -> Stats:
    """Compare two sums of tensors of one shape: in place, or chunk by chunk if some elements are left out."""
    if find_lost is None:
        found = measure_sums(xs, ys)
        if not (found.inf_a and found.inf_b):
            return found
    total = Stats()
    for cut in cut_chunks(tuple(xs[0][1].shape)):
        where = tuple(slice(*run) for run in cut)
        x, y = add_terms(xs, where), add_terms(ys, where)
        if find_lost is not None:
            left_out = find_lost(cut)
            x, y = x.masked_fill(left_out, 0), y.masked_fill(left_out, 0)
        found = compare_pair(x, y)
        if found.max_at is not None:
            at = tuple(start + i for (start, _), i in zip(cut, found.max_at, strict=True))
            found = replace(found, max_at=at)
        total = total + found
    return total


def compare_pair(x: torch.Tensor, y: torch.Tensor, *, factor: float = 1.0) -> Stats:
    """Compare y x factor with x. Infinities in the same place are equal: attention masks are full of them."""
    found = measure_difference(x, y, factor=factor)
    if not (found.inf_a and found.inf_b):
        return found
    same = x.isinf() & (x == y)
    return measure_difference(x.masked_fill(same, 0), y.masked_fill(same, 0), factor=factor)


def add_terms(terms: Sequence[Term], where: tuple[Any, ...]) -> torch.Tensor:
    """Add up a part of all terms: in float64, if it is more than one tensor."""
    (factor, first), *others = terms
    if factor == 1.0 and not others:
        return first[where]
    total = first[where].to(torch.float64) * factor
    for factor, term in others:
        total = torch.add(total, term[where].to(torch.float64), alpha=factor)
    return total
