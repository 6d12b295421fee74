"""Causes in the order of values: the right ones along a dim, but in another place, or read in another order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

import torch

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Block, Evidence
from ttrace.judge.causes.index_names import name_indices
from ttrace.judge.causes.registry import cause
from ttrace.judge.tensors.row_matching import match_rows
from ttrace.judge.tensors.values import count_directions, project
from ttrace.judge.verdict import Cause, CauseName
from ttrace.layouts.region import ravel_index

_SAMPLE = 1 << 20
"""Of more elements, evenly spread ones show whether they were read in another order."""


@cause(
    CauseName.MOVED,
    after="find_others_values",
    shown_by="the right values in another order along a dim",
    fault="keys for values",
)
def find_moved_values(e: Evidence) -> Cause | None:
    """Find the right values in the wrong order along one dim: shifted, swapped or repeated; some may be zeros."""
    if e.values is None or e.is_too_large:
        return None
    num_directions = count_directions(e.stats.count)
    for dim, size in enumerate(e.reference.shape):
        if size < 2:
            continue
        ours, theirs = (project(side, dim, num_directions) for side in e.values)
        least = MOST_TOLERANCES * e.tolerance * float(ours.norm()) / math.sqrt(size)
        source = match_rows(ours, theirs, least, MOST_OF_ERROR)
        away = (source != torch.arange(size, device="cpu")).nonzero().flatten()
        if not len(away) or _is_chance(e, source, away):
            continue
        is_empty = ~theirs.any(1)
        rest = e.measure_rest(partial(_move, e, dim, source, is_empty))
        if e.is_explained_error(rest):
            shift = _find_shift(source, is_empty)
            empty = (is_empty & ours.any(1).roll(shift or 0)).nonzero().flatten()
            lost = f"; zeros at {name_indices(e, dim, empty)}" if len(empty) else ""
            movement = f"shifted by {shift}" if shift is not None else _describe_movement(e, dim, source, away)
            return Cause(
                CauseName.MOVED,
                f"the right values in the wrong place along dim {dim}: {movement}{lost}",
                evidence=(f"put back, the error is {rest:.1e}",),
            )
    return None


def _move(e: Evidence, dim: int, source: torch.Tensor, is_empty: torch.Tensor, block: Block) -> torch.Tensor:
    """What is left of a block if the reference's indices are moved."""
    assert e.values is not None
    moved = e.values[0].read_rows(block.bounds, dim, source[slice(*block.bounds[dim])])
    return block.theirs - moved.masked_fill(block.take(is_empty, dim), 0.0)


def _is_chance(e: Evidence, source: torch.Tensor, away: torch.Tensor) -> bool:
    """Whether any tensor would be matched as well: with short rows and a loose tolerance, something is always near.

    Each run of neighbours that moved together is one choice among all rows, and makes all their numbers match.
    """
    size, width = len(source), e.stats.count // len(source)
    shifts = (source - torch.arange(size, device="cpu"))[away]
    num_choices = 1 + int((shifts.diff() != 0).sum())
    radius = min(MOST_TOLERANCES * e.tolerance, MOST_OF_ERROR * e.stats.error)
    return num_choices * math.log(size) + len(away) * width * math.log(max(radius, 1e-300)) > math.log(1e-3)


def _find_shift(source: torch.Tensor, is_empty: torch.Tensor) -> int | None:
    """By how much all indices moved, if by the same; zeros, as of words that a batch has not, may be from anywhere."""
    size = len(source)
    shifts = ((torch.arange(size, device="cpu") - source) % size)[~is_empty].unique().tolist()
    if len(shifts) != 1:
        return None
    return int(shifts[0] - size if shifts[0] > size // 2 else shifts[0])


def _describe_movement(e: Evidence, dim: int, source: torch.Tensor, away: torch.Tensor) -> str:
    held, taken = name_indices(e, dim, away), name_indices(e, dim, source[away])
    return f"indices {held} hold those of {taken}"


@cause(
    CauseName.TRANSPOSED,
    after="find_moved_values",
    shown_by="the right values with two dims read in the wrong order",
    fault="read transposed",
)
def find_transposed_values(e: Evidence) -> Cause | None:
    """Find the right bytes read in the wrong order: a transposed tensor read as a contiguous one, or vice versa."""
    if e.values is None or len(e.reference.shape) < 2:
        return None
    ours, theirs = e.values
    at = ours.spread_index(_SAMPLE)
    found = theirs.read_elements(at)
    size = float(found.norm())
    for i, j in itertools.combinations(range(len(ours.shape)), 2):
        for other in _list_readings(at, ours.shape, i, j):
            rest = float((ours.read_elements(other) - found).norm()) / max(size, 1e-300)
            if e.is_explained_error(rest):
                return Cause(
                    CauseName.TRANSPOSED,
                    f"the right values with dims {i} and {j} read in the wrong order: transposed or not contiguous",
                    evidence=(f"read the other way, the error is {rest:.1e}",),
                )
    return None


def _list_readings(at: torch.Tensor, shape: tuple[int, ...], i: int, j: int) -> Iterator[torch.Tensor]:
    """Where these elements of a tensor of that shape lie, if it was transposed and read as it was, or the reverse."""
    swapped = list(range(len(shape)))
    swapped[i], swapped[j] = j, i
    other = tuple(shape[dim] for dim in swapped)
    index = torch.unravel_index(at, other)
    yield ravel_index([index[dim] for dim in swapped], shape)
    index = torch.unravel_index(at, shape)
    yield ravel_index([index[dim] for dim in swapped], other)
