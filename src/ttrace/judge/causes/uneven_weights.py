"""The cause that rows of a tensor do not count alike, as in a mean of means."""

from __future__ import annotations

import itertools
import math
from functools import partial

import torch

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Block, Evidence
from ttrace.judge.causes.index_names import name_holders, name_indices
from ttrace.judge.causes.registry import cause
from ttrace.judge.verdict import Cause, CauseName

_MEAN = ", as in a mean of means over parts of different sizes"
_MOST_NAMED = 4

Run = tuple[torch.Tensor, float]
"""Indices that have one weight, and that weight."""


@cause(
    CauseName.UNEVEN_WEIGHTS,
    after="find_wrong_rows",
    shown_by="runs of indices, or what single ranks hold, are the reference times a number each, as in a mean of means",
    bug="local-map-uneven",
)
def find_uneven_weights(e: Evidence) -> Cause | None:
    """Find runs of indices of one dim that are the reference times a number each, none of which is 1.

    Rows that are zero on both sides, such as masked tokens, have no weight.
    """
    for dim, sums in e.row_sums.items():
        live = ((sums.aa > 0) | (sums.bb > 0)).nonzero().flatten()
        if len(live) < 3 or e.stats.count // len(sums.aa) < 4:
            continue  # a factor for a few numbers proves nothing
        weights = sums.ab / sums.aa.clamp_min(1e-300)
        runs = _find_runs(live, weights[live], MOST_TOLERANCES * e.tolerance)
        is_uneven = 2 <= len(runs) <= len(live) // 2 and all(
            abs(weight - 1) > MOST_TOLERANCES * e.tolerance for _, weight in runs
        )
        rest = e.measure_rest(partial(_weight, dim, weights)) if is_uneven else math.inf
        if e.is_explained_error(rest):
            ending = _MEAN if _is_mean_of_means(_count_tokens(e, dim), runs, e.tolerance) else ""
            return Cause(
                CauseName.UNEVEN_WEIGHTS,
                f"indices of dim {dim} do not count alike: {_name_runs(e, dim, runs)}{ending}",
                evidence=(f"weighted so, the error is {rest:.1e}",),
            )
    return None


def _weight(dim: int, weights: torch.Tensor, block: Block) -> torch.Tensor:
    return block.theirs - block.take(weights, dim) * block.ours


def _find_runs(indices: torch.Tensor, weights: torch.Tensor, tolerance: float) -> list[Run]:
    borders = ((weights.diff().abs() > tolerance).nonzero().flatten() + 1).tolist()
    spans = itertools.pairwise([0, *borders, len(weights)])
    return [(indices[start:stop], float(weights[start:stop].mean())) for start, stop in spans]


def _count_tokens(e: Evidence, dim: int) -> torch.Tensor:
    """How many vectors of each index are not zero."""
    tokens = torch.zeros(e.reference.shape[dim], dtype=torch.int64, device="cpu")
    for block in e.blocks():
        rows = block.ours.movedim(dim, 0)
        live = rows.flatten(1, -2).any(-1).sum(1) if rows.ndim > 2 else rows.any(1).to(torch.int64)
        tokens[slice(*block.bounds[dim])] += live
    return tokens


def _is_mean_of_means(tokens: torch.Tensor, runs: list[Run], tolerance: float) -> bool:
    """Whether all runs have the same share in the whole, and these are the whole: tokens that are zero do not count."""
    total = int(tokens.sum())
    shares = [int(tokens[run].sum()) * weight for run, weight in runs]
    is_same = max(shares) - min(shares) <= MOST_TOLERANCES * tolerance * total
    return is_same and math.isclose(sum(shares), total, rel_tol=MOST_OF_ERROR)


def _name_runs(e: Evidence, dim: int, runs: list[Run]) -> str:
    """Each run by the ranks that hold it, if every run has its own; else by its indices."""
    holders = [name_holders(e, dim, run) for run, _ in runs]
    if all(holders) and len(set(holders)) == len(holders):
        names = [f"those of {who}" for who in holders]
    else:
        names = [name_indices(e, dim, run) for run, _ in runs]
    words = [f"{name} count {weight:.4g} x" for name, (_, weight) in zip(names, runs, strict=True)]
    more = f" and {len(words) - _MOST_NAMED} further runs" if len(words) > _MOST_NAMED else ""
    return f"{', '.join(words[:_MOST_NAMED])}{more}"
