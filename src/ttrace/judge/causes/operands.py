"""Causes in what a tensor was computed from: the wrong rows of a table, the wrong input, the wrong microbatches."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import partial

import torch

from ttrace.judge.causes.evidence import Block, Evidence, cause
from ttrace.judge.tensors.difference import enumerate_few, name_by_axis
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.tensors.values import Values, count_directions, find_nearest, project_last, project_product
from ttrace.judge.verdict import Cause, CauseName
from ttrace.layouts.ids import Kind, TensorId, drop_numbers
from ttrace.values.stats import LEAST_DIVISOR

_SAMPLE = 256
"""The number of rows that show whether a module looks up rows of its weight at all."""
_MOST_MICROBATCHES = 16
_NEARLY = 0.01
"""The largest distance of a fitted count from a whole number."""

Recorded = Mapping[int | None, Values]
"""The values of one tensor by microbatch."""


@cause(
    CauseName.WRONG_LOOKUP,
    kinds=(Kind.OUTPUT,),
    shown_by="rows of the module's own table, but different ones than the reference's",
    bug="embedding-mask-rebased",
)
def find_wrong_lookup(evidence: Evidence) -> Cause | None:
    """Find different rows of the module's own table than the reference's: ids were shifted or masked wrongly."""
    name = f"{evidence.comparison.id.name}.weight"
    table = LogicalTensor.of(evidence.reference_trace, TensorId.of(evidence.comparison.id.step, None, name, Kind.PARAM))
    if table is None or evidence.values is None or table.shape[1:] != evidence.reference.shape[-1:]:
        return None
    num_directions = count_directions(math.prod(table.shape))
    rows = project_last(Values(table), num_directions)
    ours, theirs = (project_last(side, num_directions) for side in evidence.values)
    few = ours[:: max(len(ours) // _SAMPLE, 1)]
    if not evidence.is_explained_error(float(find_nearest(few, rows)[1].norm() / few.norm())):
        return None  # the module does not look up rows
    own, (source, found) = find_nearest(ours, rows)[1], find_nearest(theirs, rows)
    rest = max(float(d.norm() / ours.norm()) for d in (own, found))
    if not evidence.is_explained_error(rest):
        return None
    is_wrong = (theirs - ours).norm(dim=1) > evidence.tolerance * ours.norm(dim=1)
    looked_up = source[is_wrong].unique().tolist()
    which = f"row{'s' * (len(looked_up) > 1)} {enumerate_few(looked_up)}"
    return Cause(
        CauseName.WRONG_LOOKUP,
        f"{int(is_wrong.sum())} of {len(ours)} rows are other rows of {name} than the reference's: {which}",
        evidence=(f"as rows of {name} they have an error of {rest:.1e}",),
    )


@cause(
    CauseName.STALE_INPUT,
    kinds=(Kind.PARAM_GRAD, Kind.MAIN_GRAD),
    shown_by="the gradient that the weight would have with the input of another microbatch or layer",
    bug="tp-overlap-shared-buffer",
)
def find_stale_input(evidence: Evidence) -> Cause | None:
    """Find the gradient that the weight would have with another input: the saved input was overwritten."""
    own = evidence.comparison.id
    if own.microbatch is not None or evidence.values is None or len(evidence.reference.shape) != 2:
        return None
    module = own.name.rpartition(".")[0]
    incoming, inputs = _read_recorded(evidence, module, Kind.GRAD_OUTPUT), _read_recorded(evidence, module, Kind.INPUT)
    num_directions = count_directions(evidence.stats.count)
    right = _multiply(incoming, inputs, num_directions)
    if right is None:
        return None
    ours, theirs = (project_last(side, num_directions) for side in evidence.values)
    if not evidence.is_explained_error(_measure_error(ours, right)):
        return None  # the gradient is not the product of these two
    for words, other in _list_other_inputs(evidence, module, inputs):
        made = _multiply(incoming, other, num_directions)
        rest = 1.0 if made is None else _measure_error(theirs, made)
        if evidence.is_explained_error(rest):
            return Cause(
                CauseName.STALE_INPUT,
                f"the gradient is made from {words}, not from its own: what was kept for the backward was overwritten",
                evidence=(f"made from that, the error is {rest:.1e}",),
            )
    return None


@cause(
    CauseName.MICROBATCHES,
    kinds=(Kind.PARAM_GRAD,),
    shown_by="the sum of what the microbatches add, some of them too often or never",
    bug="transformers-norms-reduced-again",
)
def find_miscounted_microbatches(evidence: Evidence) -> Cause | None:
    """Find a sum over microbatches that counts some of them too often or never."""
    own = evidence.comparison.id
    if own.microbatch is not None or evidence.linear.values is None:
        return None
    ours, theirs = (_project_gradient(side) for side in evidence.linear.values)
    shares = _list_shares(evidence, ours)
    if not 2 <= len(shares) <= _MOST_MICROBATCHES:
        return None
    parts = torch.stack([share.flatten() for share in shares.values()], 1)
    found = torch.linalg.lstsq(parts, theirs.flatten()[:, None]).solution
    rest = _measure_error(theirs, (parts @ found).view_as(theirs))
    solved = found.flatten().tolist()
    whole = [round(count) for count in solved]
    if not evidence.is_explained_error(rest) or any(abs(a - b) > _NEARLY for a, b in zip(solved, whole, strict=True)):
        return None
    by_count: dict[int, list[int]] = {}
    for microbatch, count in zip(shares, whole, strict=True):
        if count != 1 and microbatch is not None:
            by_count.setdefault(count, []).append(microbatch)
    if not by_count:
        return None
    wrong = [_name_count(evidence, count, those, set(shares)) for count, those in by_count.items()]
    return Cause(
        CauseName.MICROBATCHES,
        f"microbatches are not summed once each: {', '.join(wrong)}",
        evidence=(f"summed so, the error is {rest:.1e}",),
    )


@cause(
    CauseName.BACKWARD_LEFT_OUT,
    kinds=(Kind.GRAD_OUTPUT,),
    shown_by="the gradient before the backward of a softmax of the module's output",
    bug="loss-parallel-log-softmax",
)
def find_backward_left_out(evidence: Evidence) -> Cause | None:
    """Find the gradient before the backward of a softmax of the module's output."""
    output = LogicalTensor.of(evidence.reference_trace, evidence.comparison.id.at(Kind.OUTPUT))
    if output is None or evidence.values is None or output.shape != evidence.reference.shape:
        return None
    scores = Values(output)
    for name in ("log-softmax", "softmax"):
        rest = evidence.measure_rest(partial(_go_back, scores, name))
        if evidence.is_explained_error(rest):
            return Cause(
                CauseName.BACKWARD_LEFT_OUT,
                f"the gradient is the one before the backward of a {name} along the last dim, which was left out",
                evidence=(f"after it, the error is {rest:.1e}",),
            )
    return None


def _project_gradient(values: Values) -> torch.Tensor:
    """Project the rows of a weight's gradient; the gradient of a bias stays as it is."""
    if len(values.shape) > 1:
        return project_last(values, count_directions(values.count))
    return values.read(((0, values.count),))


def _list_shares(evidence: Evidence, whole: torch.Tensor) -> dict[int | None, torch.Tensor]:
    """List what each microbatch adds to the reference's gradient, as recorded or computed again for a linear layer.

    All are projected like the gradient itself, which is `whole`.
    """
    own, shape = evidence.comparison.id, evidence.reference.shape
    recorded = _read_recorded(evidence.linear, own.name, Kind.PARAM_GRAD, finals=False)
    if recorded:
        return {microbatch: _project_gradient(values) for microbatch, values in recorded.items()}
    module = own.name.rpartition(".")[0]
    incoming, inputs = _read_recorded(evidence, module, Kind.GRAD_OUTPUT), _read_recorded(evidence, module, Kind.INPUT)
    made: dict[int | None, torch.Tensor] = {}
    for microbatch in incoming.keys() & inputs.keys():
        g, x = incoming[microbatch], inputs[microbatch]
        if len(shape) == 1 and g.shape[-1:] == shape and len(g.shape) > 1:
            made[microbatch] = _sum_vectors(g)  # of the bias
        elif len(shape) == 2 and shape == (*g.shape[-1:], *x.shape[-1:]):
            share = _multiply({microbatch: g}, {microbatch: x}, count_directions(evidence.stats.count))
            if share is not None:
                made[microbatch] = share
    is_whole = bool(made) and evidence.is_explained_error(
        _measure_error(whole, torch.stack(list(made.values())).sum(0))
    )
    return dict(sorted(made.items(), key=lambda item: item[0] or 0)) if is_whole else {}


def _sum_vectors(values: Values) -> torch.Tensor:
    total = torch.zeros(values.shape[-1], dtype=torch.float64, device="cpu")
    for bounds in values.cut():
        total[slice(*bounds[-1])] += values.read(bounds).flatten(0, -2).sum(0)
    return total


def _name_count(evidence: Evidence, count: int, microbatches: list[int], everything: set[int | None]) -> str:
    """Describe how often some microbatches count, with their ranks if those ran no other microbatches."""
    ran, others = (_find_ranks(evidence, those) for those in (set(microbatches), everything - set(microbatches)))
    is_plural = len(microbatches) > 1
    which = f"microbatch{'es' * is_plural} {enumerate_few(microbatches)}"
    if ran and others and not ran & others:
        which += f" ({'those' if is_plural else 'that'} of {name_by_axis(ran, ran | others, evidence.mesh)[0]})"
    return f"{which} count{'s' * (not is_plural)} {count} times"


def _find_ranks(evidence: Evidence, microbatches: Collection[int | None]) -> set[int]:
    step, shards = evidence.comparison.id.step, evidence.candidate_trace.shards
    ids = (t for t in shards if t.step == step and t.microbatch in microbatches and t.kind is Kind.OUTPUT)
    return {shard.coord.rank for tensor_id in ids for shard in shards[tensor_id]}


def _go_back(scores: Values, name: str, block: Block) -> torch.Tensor:
    """Compute what is left of a block after the backward of this function."""
    p = scores.read(block.bounds).softmax(-1)
    theirs = block.theirs
    if name == "softmax":
        return p * (theirs - (p * theirs).sum(-1, keepdim=True)) - block.ours
    return theirs - p * theirs.sum(-1, keepdim=True) - block.ours


def _list_other_inputs(evidence: Evidence, module: str, inputs: Recorded) -> Iterator[tuple[str, Recorded]]:
    """List inputs that may have been used instead: one microbatch's for all, or the same module's in another layer."""
    for microbatch, x in inputs.items() if len(inputs) > 1 else ():
        yield f"the input of microbatch {microbatch}", dict.fromkeys(inputs, x)
    pattern = drop_numbers(module)
    for name in dict.fromkeys(t.name for t in evidence.reference_trace.shards if t.kind is Kind.INPUT):
        if name != module and drop_numbers(name) == pattern:
            yield f"the input of {name}", _read_recorded(evidence, name, Kind.INPUT)


def _read_recorded(evidence: Evidence, module: str, kind: Kind, *, finals: bool = True) -> Recorded:
    """Read the reference's tensors of a kind at a module; empty unless there is one for each microbatch.

    With `finals` false, the final gradient is left out.
    """
    step = evidence.comparison.id.step
    ids = [t for t in evidence.reference_trace.shards if t.name == module and t.kind is kind and t.step == step]
    ids = [t for t in ids if finals or t.microbatch is not None]
    if len({t.microbatch for t in ids}) != len(ids):
        return {}
    found = {t.microbatch: LogicalTensor.of(evidence.reference_trace, t) for t in ids}
    return {microbatch: evidence.make_values(logical) for microbatch, logical in found.items() if logical is not None}


def _multiply(incoming: Recorded, inputs: Recorded, num_directions: int) -> torch.Tensor | None:
    """Compute the gradient of a linear layer's weight from its operands, with projected rows."""
    if not incoming or incoming.keys() != inputs.keys():
        return None
    total: torch.Tensor | None = None
    for microbatch, g in incoming.items():
        x = inputs[microbatch]
        if len(g.shape) < 2 or g.shape[:-1] != x.shape[:-1]:
            return None
        part = project_product(g, x, num_directions)
        total = part if total is None else total + part
    return total


def _measure_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / a.norm().clamp_min(LEAST_DIVISOR)) if a.shape == b.shape else 1.0
