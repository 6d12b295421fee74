"""Rows that are most like other rows: which row of the reference a row of the candidate holds."""

from __future__ import annotations

import torch

_AT_ONCE = 1 << 23
"""Distances that are measured at once."""
_MOST_PAIRS = 1 << 24
"""For more, a sample must find its rows first."""
_SAMPLE = 256
_MOST_SHIFTS = 4


def find_nearest(queries: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the row that is nearest to each query, and how far it is."""
    nearest = [torch.cdist(part, rows).min(1).indices for part in queries.split(max(_AT_ONCE // len(rows), 1))]
    index = torch.cat(nearest) if nearest else torch.zeros(0, dtype=torch.int64, device="cpu")
    return index, (rows[index] - queries).norm(dim=1)  # again: a product of matrices loses small distances


def match_rows(ours: torch.Tensor, theirs: torch.Tensor, least: float, ratio: float) -> torch.Tensor:
    """Find for every row of the candidate the row of the reference that it holds; its own, if no other is far nearer.

    Rows of zeros hold nobody's. A row to which no other is nearer than `ratio` of its own distance stays: equal rows
    are no movement. Of many rows, those that are off by no more than `least` are not searched for.
    """
    source = torch.arange(len(ours), device="cpu")
    own = (ours - theirs).norm(dim=1)
    wrong = ((own > 0) & theirs.any(1)).nonzero().flatten()
    if len(wrong) * len(ours) > _MOST_PAIRS:
        far = wrong[own[wrong] > least]
        sample = far[:: max(len(far) // _SAMPLE, 1)]
        found, distance = find_nearest(theirs[sample], ours)
        is_found = distance < ratio * own[sample]
        if 2 * int(is_found.sum()) < len(sample):
            return source  # too many are nobody's
        shifts, counts = (sample - found)[is_found].unique(return_counts=True)
        for shift in shifts[counts.argsort(descending=True)[:_MOST_SHIFTS]].tolist():
            wrong = _shift_rows(source, ours, theirs, own, wrong, shift, ratio)
        wrong = wrong[own[wrong] > least]
    found, distance = find_nearest(theirs[wrong], ours)
    is_found = distance < ratio * own[wrong]
    source[wrong[is_found]] = found[is_found]
    return source


def _shift_rows(
    source: torch.Tensor,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    own: torch.Tensor,
    wrong: torch.Tensor,
    shift: int,
    ratio: float,
) -> torch.Tensor:
    """Match those rows that hold what lies so many before them; return the others."""
    before = (wrong - shift) % len(ours)
    is_found = (ours[before] - theirs[wrong]).norm(dim=1) < ratio * own[wrong]
    source[wrong[is_found]] = before[is_found]
    return wrong[~is_found]
