"""Causes in the order of values: moved along a dim, or read in the wrong order of dims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

import torch

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Block, Evidence, cause
from ttrace.judge.causes.rows import name_indices
from ttrace.judge.tensors.values import count_directions, match_rows, project
from ttrace.judge.verdict import Cause, CauseName
from ttrace.layouts.region import ravel_index
from ttrace.values.stats import LEAST_DIVISOR

_SAMPLE = 1 << 20
"""The number of evenly spread elements that show whether a larger tensor was read in another order."""


@cause(
    CauseName.MOVED,
    shown_by="the right values in another order along a dim",
    bug="keys-for-values",
)
def find_moved_values(evidence: Evidence) -> Cause | None:
    """Find the right values in the wrong order along one dim: shifted, swapped or repeated; some may be zeros."""
    if evidence.values is None or evidence.is_too_large:
        return None
    num_directions = count_directions(evidence.stats.count)
    for dim, size in enumerate(evidence.reference.shape):
        if size < 2:
            continue
        ours, theirs = (project(side, dim, num_directions) for side in evidence.values)
        least = MOST_TOLERANCES * evidence.tolerance * float(ours.norm()) / math.sqrt(size)
        source = match_rows(ours, theirs, least, MOST_OF_ERROR)
        away = (source != torch.arange(size, device="cpu")).nonzero().flatten()
        if not len(away) or _is_chance(evidence, source, away):
            continue
        is_empty = ~theirs.any(1)
        rest = evidence.measure_rest(partial(_move, evidence, dim, source, is_empty))
        if evidence.is_explained_error(rest):
            shift = _find_shift(source, is_empty)
            empty = (is_empty & ours.any(1).roll(shift or 0)).nonzero().flatten()
            zeros = f"; zeros at {name_indices(evidence, dim, empty)}" if len(empty) else ""
            movement = f"shifted by {shift}" if shift is not None else _describe_movement(evidence, dim, source, away)
            return Cause(
                CauseName.MOVED,
                f"the right values in the wrong place along dim {dim}: {movement}{zeros}",
                evidence=(f"put back, the error is {rest:.1e}",),
            )
    return None


@cause(
    CauseName.TRANSPOSED,
    shown_by="the right values with two dims read in the wrong order",
    bug="read-transposed",
)
def find_transposed_values(evidence: Evidence) -> Cause | None:
    """Find the right values read in the wrong order: a transposed tensor read as a contiguous one, or vice versa."""
    if evidence.values is None or len(evidence.reference.shape) < 2:
        return None
    ours, theirs = evidence.values
    at = ours.spread_index(_SAMPLE)
    found = theirs.read_elements(at)
    size = float(found.norm())
    for i, j in itertools.combinations(range(len(ours.shape)), 2):
        for other in _list_readings(at, ours.shape, i, j):
            rest = float((ours.read_elements(other) - found).norm()) / max(size, LEAST_DIVISOR)
            if evidence.is_explained_error(rest):
                return Cause(
                    CauseName.TRANSPOSED,
                    f"the right values with dims {i} and {j} read in the wrong order: transposed or not contiguous",
                    evidence=(f"read the other way, the error is {rest:.1e}",),
                )
    return None


def _move(evidence: Evidence, dim: int, source: torch.Tensor, is_empty: torch.Tensor, block: Block) -> torch.Tensor:
    """Compute what is left of a block after the reference's indices are moved."""
    assert evidence.values is not None
    moved = evidence.values[0].read_rows(block.bounds, dim, source[slice(*block.bounds[dim])])
    return block.theirs - moved.masked_fill(block.take(is_empty, dim), 0.0)


def _is_chance(evidence: Evidence, source: torch.Tensor, away: torch.Tensor) -> bool:
    """Whether the match may be chance: with short rows and a loose tolerance, some row is always near.

    Each run of neighbours that moved together is one choice among all rows. The probability that all of their numbers
    match by chance must be below 0.1%.
    """
    size, width = len(source), evidence.stats.count // len(source)
    shifts = (source - torch.arange(size, device="cpu"))[away]
    num_choices = 1 + int((shifts.diff() != 0).sum())
    radius = min(MOST_TOLERANCES * evidence.tolerance, MOST_OF_ERROR * evidence.stats.error)
    return num_choices * math.log(size) + len(away) * width * math.log(max(radius, LEAST_DIVISOR)) > math.log(1e-3)


def _find_shift(source: torch.Tensor, is_empty: torch.Tensor) -> int | None:
    """Find the shift of all indices, if it is the same; zeros match anything, such as tokens that a batch lacks."""
    size = len(source)
    shifts = ((torch.arange(size, device="cpu") - source) % size)[~is_empty].unique().tolist()
    if len(shifts) != 1:
        return None
    return int(shifts[0] - size if shifts[0] > size // 2 else shifts[0])


def _describe_movement(evidence: Evidence, dim: int, source: torch.Tensor, away: torch.Tensor) -> str:
    held, taken = name_indices(evidence, dim, away), name_indices(evidence, dim, source[away])
    return f"indices {held} hold those of {taken}"


def _list_readings(at: torch.Tensor, shape: tuple[int, ...], i: int, j: int) -> Iterator[torch.Tensor]:
    """List the indices of these elements if the tensor was transposed and read as contiguous, and the reverse."""
    swapped = list(range(len(shape)))
    swapped[i], swapped[j] = j, i
    other = tuple(shape[dim] for dim in swapped)
    index = torch.unravel_index(at, other)
    yield ravel_index([index[dim] for dim in swapped], shape)
    index = torch.unravel_index(at, shape)
    yield ravel_index([index[dim] for dim in swapped], other)
