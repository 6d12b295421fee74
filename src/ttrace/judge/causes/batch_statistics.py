"""The cause of a normalisation that sees only this rank's rows of a batch that is divided over data axes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ttrace.judge.causes.evidence import MOST_OF_ERROR, Evidence
from ttrace.judge.causes.registry import cause
from ttrace.judge.verdict import Cause, CauseName
from ttrace.tensors.ids import Kind
from ttrace.tensors.region import Region


@cause(
    CauseName.OWN_STATISTICS,
    after="find_gradient_norm",
    shown_by="a normalisation that sees only this rank's rows of a batch that is split over ranks",
    unproven="no entry has a BatchNorm; tests/judge/causes/test_batch_statistics.py",
)
def find_own_statistics(e: Evidence) -> Cause | None:
    """Find rows of each rank that have, per channel, the mean and spread of the reference's whole batch."""
    axes = e.candidate_trace.batch_axes
    if e.comparison.id.kind is not Kind.OUTPUT or not axes or len(e.reference.shape) < 2:
        return None
    parts = list(_find_row_parts(e))
    if len(parts) < 2 or e.tensors is None:
        return None
    reference, candidate = e.tensors
    whole = _measure_channels(reference)
    off = max(_measure_distance(_measure_channels(candidate[start:stop]), whole) for start, stop in parts)
    by_right = min(_measure_distance(_measure_channels(reference[start:stop]), whole) for start, stop in parts)
    if off > MOST_OF_ERROR * by_right:
        return None
    named = ", ".join(axes)
    return Cause(
        CauseName.OWN_STATISTICS,
        f"statistics of this rank's rows only: they are not combined over {named}",
        axes[0] if len(axes) == 1 else None,
        (
            f"the rows of each rank have the mean and spread of all rows of the reference, to {off:.1e}; the same rows "
            f"of the reference are {by_right:.1e} off",
            f"where the module is a BatchNorm, use torch.nn.SyncBatchNorm over {named}",
        ),
    )


def _find_row_parts(e: Evidence) -> Iterator[tuple[int, int]]:
    """The rows of each rank, where all hold one run of them and everything else is whole."""
    found: dict[tuple[int, int], None] = {}
    for piece in e.candidate.pieces:
        region, whole = piece.region, Region.whole(e.candidate.shape)
        if region.flat is None and len(region.dims[0]) == 1 and region.dims[1:] == whole.dims[1:]:
            found[region.dims[0][0]] = None
    yield from found


def _measure_channels(tensor: torch.Tensor) -> torch.Tensor:
    """Mean and standard deviation of each channel, which are dim 1."""
    channels = tensor.transpose(0, 1).flatten(1)
    return torch.stack([channels.mean(1), channels.std(1, correction=0)])


def _measure_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
