"""Causes in what a module computes: a function on one side only, a part counted wrongly, statistics of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Block, Evidence, cause
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.tensors.values import Values
from ttrace.judge.verdict import Cause, CauseName
from ttrace.layouts.ids import ROOT, Kind, Site
from ttrace.layouts.region import Region
from ttrace.values.stats import LEAST_DIVISOR

Function = Callable[[torch.Tensor], torch.Tensor]
_FUNCTIONS: Mapping[str, Function] = {
    "softmax": lambda x: x.softmax(-1),
    "logarithm of the softmax": lambda x: x.log_softmax(-1),
    "sigmoid": torch.sigmoid,
    "exponential": torch.exp,
    "hyperbolic tangent": torch.tanh,
    "ReLU": torch.relu,
    "SiLU": F.silu,
    "GELU": F.gelu,
}
"""Functions that are easily applied twice, or forgotten. The softmax is over the last dim."""
_FEW = 4
"""The least number of rows or positions that prove anything."""
_LIKELY = 0.5
"""If a function leaves more than this share of the error in the first block, the other blocks are not read."""


@cause(
    CauseName.FUNCTION,
    shown_by="one side is a function of the other: softmax, sigmoid, an activation",
    bug="transformers-router-softmaxed-twice",
)
def find_function(evidence: Evidence) -> Cause | None:
    """Find a function that only one side applied."""
    is_forward = not evidence.comparison.id.kind.is_backward and not evidence.comparison.id.kind.is_of_param
    if not is_forward or not evidence.reference.dtype.is_floating_point or not evidence.reference.shape:
        return None
    for name, function in _FUNCTIONS.items() if evidence.values is not None else ():
        for leave, words in (
            (_leave_of_candidate, f"the candidate is the {name} of the reference: only the candidate applies it"),
            (_leave_of_reference, f"the reference is the {name} of the candidate: only the reference applies it"),
        ):
            rest = evidence.measure_rest(partial(leave, function), most_blocks=1)
            if rest <= _LIKELY * evidence.stats.error:
                rest = evidence.measure_rest(partial(leave, function))
            if evidence.is_explained_error(rest):
                return Cause(CauseName.FUNCTION, words, evidence=(f"with it the error is {rest:.1e}",))
    return None


@cause(
    CauseName.ROW_FACTORS,
    kinds=(Kind.OUTPUT,),
    shown_by="each row is the reference's times a number of its own: a norm with another epsilon, or probabilities "
    "that are not normalised",
    bug="port-norm-eps",
)
def find_row_factors(evidence: Evidence) -> Cause | None:
    """Find rows that are the reference's times a number each: a normalisation divides by a different number."""
    shape = evidence.reference.shape
    if evidence.num_buckets or len(shape) < 2 or shape[-1] < _FEW or evidence.values is None:
        return None
    rest = evidence.measure_rest(lambda block: block.theirs - _measure_factors(block) * block.ours)
    if not evidence.is_explained_error(rest):
        return None
    factors = torch.cat([_measure_factors(block).flatten() for block in evidence.blocks()])
    low, high = factors.aminmax()
    return Cause(
        CauseName.ROW_FACTORS,
        f"each row is the reference's times a number of its own, {low:.4g} to {high:.4g}: a normalisation divides by "
        "something else, such as another epsilon or sum",
        evidence=(f"apart from these numbers the error is {rest:.1e}",),
    )


@cause(
    CauseName.ATTENTION_SCORES,
    kinds=(Kind.OUTPUT,),
    shown_by="the first position, which sees only itself, is right, and every other is wrong: rotary embeddings, scale "
    "or mask differ",
    bug="port-rope-theta",
)
def find_attention_scores(evidence: Evidence) -> Cause | None:
    """Find a sequence in which only the first position is right: causal attention has only one weight there, 1."""
    if evidence.num_buckets or len(evidence.reference.shape) < 3:
        return None
    for dim, sums in list(evidence.row_sums.items())[:2]:
        errors = (sums.dd / sums.aa.clamp_min(LEAST_DIVISOR)).sqrt()
        if (
            len(errors) >= _FEW
            and errors[0] <= evidence.tolerance
            and errors[1:].min() > MOST_TOLERANCES * evidence.tolerance
        ):
            return Cause(
                CauseName.ATTENTION_SCORES,
                f"index 0 of dim {dim} is right, and all {len(errors) - 1} others are wrong: the scores of attention "
                "differ, by rotary embeddings, a scale or a mask",
                evidence=(f"the error at index 0 is {errors[0]:.1e}, elsewhere at least {errors[1:].min():.1e}",),
            )
    return None


@cause(
    CauseName.MISCOUNTED_PART,
    kinds=(Kind.OUTPUT, Kind.GRAD_INPUT),
    shown_by="the difference is what one module inside makes: added too often, or left out",
    bug="lora-counted-on-every-rank",
)
def find_miscounted_part(evidence: Evidence) -> Cause | None:
    """Find a module inside whose output, or whose gradient, is added too often or left out."""
    if evidence.linear.values is None:
        return None
    for name, part in _list_parts(evidence.linear):
        count, rest = count_part(evidence.linear, part)
        if count:
            what = "output" if evidence.comparison.id.kind is Kind.OUTPUT else "gradient"
            often = "once" if count == 1 else f"{count} times"
            words = "left out" if count == -1 else f"added {often} too often" if count > 0 else f"added {count} times"
            return Cause(
                CauseName.MISCOUNTED_PART,
                f"the {what} of {name} is {words}",
                evidence=(f"apart from that the error is {rest:.1e}",),
            )
    return None


def count_part(evidence: Evidence, part: Values) -> tuple[int, float]:
    """Count how often a part is added too often, if that explains the error, and measure what is left then."""
    surplus = squares = 0.0
    for block in evidence.blocks():
        values = part.read(block.bounds)
        surplus += float(((block.theirs - block.ours) * values).sum())
        squares += float(values.square().sum())
    count = round(surplus / max(squares, LEAST_DIVISOR)) if math.isfinite(squares) else 0
    if count == 0:
        return 0, math.inf
    rest = evidence.measure_rest(lambda block: block.theirs - block.ours - count * part.read(block.bounds))
    return (count, rest) if evidence.is_explained_error(rest) else (0, rest)


@cause(
    CauseName.OWN_STATISTICS,
    kinds=(Kind.OUTPUT,),
    shown_by="a normalisation that sees only this rank's rows of a batch that is split over ranks",
    unproven="no entry has a BatchNorm; tests/judge/causes/test_batch_statistics.py",
)
def find_own_statistics(evidence: Evidence) -> Cause | None:
    """Find rows of each rank that have, per channel, the mean and spread of the reference's whole batch."""
    axes = evidence.candidate_trace.batch_axes
    if not axes or len(evidence.reference.shape) < 2:
        return None
    parts = list(_find_row_parts(evidence))
    if len(parts) < 2 or evidence.values is None:
        return None
    reference, candidate = ([_measure_channels(side, rows) for rows in parts] for side in evidence.values)
    whole = _describe_channels(torch.stack(reference).sum(0))
    distance = max(_measure_distance(_describe_channels(sums), whole) for sums in candidate)
    of_reference = min(_measure_distance(_describe_channels(sums), whole) for sums in reference)
    if distance > MOST_OF_ERROR * of_reference:
        return None
    named = ", ".join(axes)
    return Cause(
        CauseName.OWN_STATISTICS,
        f"statistics of this rank's rows only: they are not combined over {named}",
        axes[0] if len(axes) == 1 else None,
        (
            f"the rows of each rank have the mean and spread of all rows of the reference, to {distance:.1e}; the same "
            f"rows of the reference differ from it by {of_reference:.1e}",
            f"where the module is a BatchNorm, use torch.nn.SyncBatchNorm over {named}",
        ),
    )


def _leave_of_candidate(function: Function, block: Block) -> torch.Tensor:
    return function(block.ours) - block.theirs


def _leave_of_reference(function: Function, block: Block) -> torch.Tensor:
    return function(block.theirs) - block.ours


def _measure_factors(block: Block) -> torch.Tensor:
    """Measure the number by which each row of the last dim differs."""
    return (block.ours * block.theirs).sum(-1, keepdim=True) / block.ours.square().sum(-1, keepdim=True).clamp_min(
        LEAST_DIVISOR
    )


def _list_parts(evidence: Evidence) -> Iterator[tuple[str, Values]]:
    """List the reference's tensors of the same kind and shape of the modules right inside this one."""
    own, shape = evidence.comparison.id, tuple(evidence.reference.shape)
    prefix = "" if own.name == ROOT else f"{own.name}."
    for other in evidence.reference_trace.shards:
        name = other.name
        is_inside = name != ROOT and name.startswith(prefix) and "." not in name.removeprefix(prefix)
        if is_inside and other == own._replace(site=Site(name, own.kind, own.site.slot)):
            part = LogicalTensor.of(evidence.reference_trace, other)
            if part is not None and tuple(part.shape) == shape:
                yield name, evidence.make_values(part)


def _find_row_parts(evidence: Evidence) -> Iterator[tuple[int, int]]:
    """Find the runs of rows that ranks hold, if they hold all other dims whole."""
    runs: dict[tuple[int, int], None] = {}
    for piece in evidence.candidate.pieces:
        region, whole = piece.region, Region.whole(evidence.candidate.shape)
        if region.flat is None and len(region.dims[0]) == 1 and region.dims[1:] == whole.dims[1:]:
            runs[region.dims[0][0]] = None
    yield from runs


def _measure_channels(values: Values, rows: tuple[int, int]) -> torch.Tensor:
    """Measure count, sum and sum of squares of each channel, which is dim 1, in some rows."""
    sums = torch.zeros(3, values.shape[1], dtype=torch.float64, device="cpu")
    for bounds in values.cut(rows):
        block = values.read(bounds).transpose(0, 1).flatten(1)
        sums[0, slice(*bounds[1])] += block.shape[1]
        sums[1, slice(*bounds[1])] += block.sum(1)
        sums[2, slice(*bounds[1])] += block.square().sum(1)
    return sums


def _describe_channels(sums: torch.Tensor) -> torch.Tensor:
    """Return mean and standard deviation of each channel."""
    mean = sums[1] / sums[0]
    return torch.stack([mean, (sums[2] / sums[0] - mean.square()).clamp_min(0.0).sqrt()])


def _measure_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
