"""Causes in what a module computes: a function on one side only, a part that does not count once, own statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Block, Evidence
from ttrace.judge.causes.registry import cause
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.tensors.values import Values
from ttrace.judge.verdict import Cause, CauseName
from ttrace.layouts.ids import ROOT, Kind, Site
from ttrace.layouts.region import Region

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
"""Rows or positions of which there are fewer prove nothing."""
_LIKELY = 0.5
"""If a function leaves more of the error than this in the first block, the others are not looked at."""


@cause(
    CauseName.FUNCTION,
    after="find_weaker_dtype",
    shown_by="one side is a function of the other: softmax, sigmoid, an activation",
    bug="transformers-router-softmaxed-twice",
)
def find_function(e: Evidence) -> Cause | None:
    """Find a function that only one side applied."""
    is_forward = not e.comparison.id.kind.is_backward and not e.comparison.id.kind.is_of_param
    if not is_forward or not e.reference.dtype.is_floating_point or not e.reference.shape:
        return None
    for name, function in _FUNCTIONS.items() if e.values is not None else ():
        for leave, words in (
            (_leave_of_candidate, f"the candidate is the {name} of the reference: only the candidate applies it"),
            (_leave_of_reference, f"the reference is the {name} of the candidate: only the reference applies it"),
        ):
            rest = e.measure_rest(partial(leave, function), most_blocks=1)
            if rest <= _LIKELY * e.stats.error:
                rest = e.measure_rest(partial(leave, function))
            if e.is_explained_error(rest):
                return Cause(CauseName.FUNCTION, words, evidence=(f"with it the error is {rest:.1e}",))
    return None


def _leave_of_candidate(function: Function, block: Block) -> torch.Tensor:
    return function(block.ours) - block.theirs


def _leave_of_reference(function: Function, block: Block) -> torch.Tensor:
    return function(block.theirs) - block.ours


@cause(
    CauseName.ROW_FACTORS,
    after="find_function",
    shown_by="each row is the reference's times a number of its own: a norm with another epsilon, chances that are not "
    "normalised",
    bug="port-norm-eps",
)
def find_row_factors(e: Evidence) -> Cause | None:
    """Find rows that are the reference's times a number each: a normalisation divides by something else."""
    shape = e.reference.shape
    if e.comparison.id.kind is not Kind.OUTPUT or e.num_buckets or len(shape) < 2 or shape[-1] < _FEW:
        return None
    if e.values is None:
        return None
    rest = e.measure_rest(lambda block: block.theirs - _measure_factors(block) * block.ours)
    if not e.is_explained_error(rest):
        return None
    factors = torch.cat([_measure_factors(block).flatten() for block in e.blocks()])
    low, high = factors.aminmax()
    return Cause(
        CauseName.ROW_FACTORS,
        f"each row is the reference's times a number of its own, {low:.4g} to {high:.4g}: a normalisation divides by "
        "something else, such as another epsilon or sum",
        evidence=(f"apart from these numbers the error is {rest:.1e}",),
    )


def _measure_factors(block: Block) -> torch.Tensor:
    """Measure the number by which each row of the last dim differs."""
    return (block.ours * block.theirs).sum(-1, keepdim=True) / block.ours.square().sum(-1, keepdim=True).clamp_min(
        1e-300
    )


@cause(
    CauseName.ATTENTION_SCORES,
    after="find_bias",
    shown_by="the first position, which sees only itself, is right, and every other is wrong: rotary embeddings, scale "
    "or mask differ",
    bug="port-rope-theta",
)
def find_attention_scores(e: Evidence) -> Cause | None:
    """Find a sequence of which only the first position is right: causal attention has nothing to weigh there."""
    if e.comparison.id.kind is not Kind.OUTPUT or e.num_buckets or len(e.reference.shape) < 3:
        return None
    for dim, sums in list(e.row_sums.items())[:2]:
        errors = (sums.dd / sums.aa.clamp_min(1e-300)).sqrt()
        if len(errors) >= _FEW and errors[0] <= e.tolerance and errors[1:].min() > MOST_TOLERANCES * e.tolerance:
            return Cause(
                CauseName.ATTENTION_SCORES,
                f"index 0 of dim {dim} is right, and all {len(errors) - 1} others are wrong: the scores of attention "
                "differ, by rotary embeddings, a scale or a mask",
                evidence=(f"the error at index 0 is {errors[0]:.1e}, elsewhere at least {errors[1:].min():.1e}",),
            )
    return None


@cause(
    CauseName.MISCOUNTED_PART,
    after="find_bias",
    shown_by="the difference is what one module inside makes: added too often, or left out",
    bug="lora-counted-on-every-rank",
)
def find_miscounted_part(e: Evidence) -> Cause | None:
    """Find a module inside whose output, or whose gradient, is added too often or left out."""
    if e.comparison.id.kind not in (Kind.OUTPUT, Kind.GRAD_INPUT) or e.linear.values is None:
        return None
    for name, part in _list_parts(e.linear):
        count, rest = count_part(e.linear, part)
        if count:
            what = "output" if e.comparison.id.kind is Kind.OUTPUT else "gradient"
            often = "once" if count == 1 else f"{count} times"
            words = "left out" if count == -1 else f"added {often} too often" if count > 0 else f"added {count} times"
            return Cause(
                CauseName.MISCOUNTED_PART,
                f"the {what} of {name} is {words}",
                evidence=(f"apart from that the error is {rest:.1e}",),
            )
    return None


def count_part(e: Evidence, part: Values) -> tuple[int, float]:
    """Count how often a part is added too often, if that explains the error, and measure what is left then."""
    surplus = squares = 0.0
    for block in e.blocks():
        values = part.read(block.bounds)
        surplus += float(((block.theirs - block.ours) * values).sum())
        squares += float(values.square().sum())
    count = round(surplus / max(squares, 1e-300)) if math.isfinite(squares) else 0
    rest = e.measure_rest(partial(_subtract, part, count)) if count else math.inf
    return (count, rest) if e.is_explained_error(rest) else (0, rest)


def _subtract(part: Values, count: int, block: Block) -> torch.Tensor:
    return block.theirs - block.ours - count * part.read(block.bounds)


def _list_parts(e: Evidence) -> Iterator[tuple[str, Values]]:
    """List the reference's tensors of the same kind and shape of the modules right inside this one."""
    own, shape = e.comparison.id, tuple(e.reference.shape)
    prefix = "" if own.name == ROOT else f"{own.name}."
    for other in e.reference_trace.shards:
        name = other.name
        is_inside = name != ROOT and name.startswith(prefix) and "." not in name.removeprefix(prefix)
        if is_inside and other == own._replace(site=Site(name, own.kind, own.site.slot)):
            part = LogicalTensor.of(e.reference_trace, other)
            if part is not None and tuple(part.shape) == shape:
                yield name, e.make_values(part)


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
    if len(parts) < 2 or e.values is None:
        return None
    reference, candidate = ([_measure_channels(side, rows) for rows in parts] for side in e.values)
    whole = _describe_channels(torch.stack(reference).sum(0))
    off = max(_measure_distance(_describe_channels(found), whole) for found in candidate)
    by_right = min(_measure_distance(_describe_channels(found), whole) for found in reference)
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


def _measure_channels(values: Values, rows: tuple[int, int]) -> torch.Tensor:
    """Count, sum and sum of squares of each channel, which are dim 1, in some rows."""
    sums = torch.zeros(3, values.shape[1], dtype=torch.float64, device="cpu")
    for bounds in values.cut(rows):
        block = values.read(bounds).transpose(0, 1).flatten(1)
        sums[0, slice(*bounds[1])] += block.shape[1]
        sums[1, slice(*bounds[1])] += block.sum(1)
        sums[2, slice(*bounds[1])] += block.square().sum(1)
    return sums


def _describe_channels(sums: torch.Tensor) -> torch.Tensor:
    """Mean and standard deviation of each channel."""
    mean = sums[1] / sums[0]
    return torch.stack([mean, (sums[2] / sums[0] - mean.square()).clamp_min(0.0).sqrt()])


def _measure_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
