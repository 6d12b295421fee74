"""Causes in what a tensor was computed from: the wrong rows of a table, the wrong input, the wrong microbatches."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import partial

import torch

from ttrace.judge.causes.evidence import Block, Evidence
from ttrace.judge.causes.registry import cause
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.tensors.rank_names import enumerate_few, name_by_axis
from ttrace.judge.tensors.row_matching import find_nearest
from ttrace.judge.tensors.values import Values, count_directions, project_last, project_product
from ttrace.judge.verdict import Cause, CauseName
from ttrace.layouts.ids import Kind, TensorId, drop_numbers

_SAMPLE = 256
"""Rows that show whether a module looks up rows of its weight at all."""
_MOST_MICROBATCHES = 16
_NEARLY = 0.01
"""How near a count must be to a whole number."""

Recorded = Mapping[int | None, Values]
"""By microbatch."""


@cause(
    CauseName.WRONG_LOOKUP,
    after="find_uneven_weights",
    shown_by="rows of the module's own table, but other ones than the reference's",
    bug="embedding-mask-rebased",
)
def find_wrong_lookup(e: Evidence) -> Cause | None:
    """Find rows of the module's own table, but other ones than the reference's: ids were shifted or masked wrongly."""
    name = f"{e.comparison.id.name}.weight"
    table = LogicalTensor.of(e.reference_trace, TensorId.of(e.comparison.id.step, None, name, Kind.PARAM))
    if table is None or e.values is None or e.comparison.id.kind is not Kind.OUTPUT:
        return None
    if table.shape[1:] != e.reference.shape[-1:]:
        return None
    num_directions = count_directions(math.prod(table.shape))
    rows = project_last(Values(table), num_directions)
    ours, theirs = (project_last(side, num_directions) for side in e.values)
    few = ours[:: max(len(ours) // _SAMPLE, 1)]
    if not e.is_explained_error(float(find_nearest(few, rows)[1].norm() / few.norm())):
        return None  # the module looks nothing up
    own, (source, found) = find_nearest(ours, rows)[1], find_nearest(theirs, rows)
    rest = max(float(d.norm() / ours.norm()) for d in (own, found))
    if not e.is_explained_error(rest):
        return None
    is_wrong = (theirs - ours).norm(dim=1) > e.tolerance * ours.norm(dim=1)
    kept = source[is_wrong].unique().tolist()
    which = f"row{'s' * (len(kept) > 1)} {enumerate_few(kept)}"
    return Cause(
        CauseName.WRONG_LOOKUP,
        f"{int(is_wrong.sum())} of {len(ours)} rows are other rows of {name} than the reference's: {which}",
        evidence=(f"as rows of {name} they have an error of {rest:.1e}",),
    )


@cause(
    CauseName.STALE_INPUT,
    after="find_wrong_lookup",
    shown_by="the gradient that the weight would have with the input of another microbatch or layer",
    bug="tp-overlap-shared-buffer",
)
def find_stale_input(e: Evidence) -> Cause | None:
    """Find the gradient that the weight would have with another input: the saved input was overwritten."""
    own = e.comparison.id
    is_final = own.kind in (Kind.PARAM_GRAD, Kind.MAIN_GRAD) and own.microbatch is None
    if not is_final or e.values is None or len(e.reference.shape) != 2:
        return None
    module = own.name.rpartition(".")[0]
    incoming, inputs = _read_recorded(e, module, Kind.GRAD_OUTPUT), _read_recorded(e, module, Kind.INPUT)
    num_directions = count_directions(e.stats.count)
    right = _multiply(incoming, inputs, num_directions)
    if right is None:
        return None
    ours, theirs = (project_last(side, num_directions) for side in e.values)
    if not e.is_explained_error(_measure_error(ours, right)):
        return None  # no product of these two
    for words, other in _list_other_inputs(e, module, inputs):
        made = _multiply(incoming, other, num_directions)
        rest = 1.0 if made is None else _measure_error(theirs, made)
        if e.is_explained_error(rest):
            return Cause(
                CauseName.STALE_INPUT,
                f"the gradient is made from {words}, not from its own: what was kept for the backward was overwritten",
                evidence=(f"made from that, the error is {rest:.1e}",),
            )
    return None


@cause(
    CauseName.MICROBATCHES,
    after="find_stale_input",
    shown_by="the sum of what the microbatches add, some of them too often or never",
    bug="transformers-norms-reduced-again",
)
def find_miscounted_microbatches(e: Evidence) -> Cause | None:
    """Find a sum over microbatches that counts some of them too often or never."""
    own = e.comparison.id
    if own.kind is not Kind.PARAM_GRAD or own.microbatch is not None or e.linear.values is None:
        return None
    ours, theirs = (_project_gradient(side) for side in e.linear.values)
    shares = _list_shares(e, ours)
    if not 2 <= len(shares) <= _MOST_MICROBATCHES:
        return None
    parts = torch.stack([share.flatten() for share in shares.values()], 1)
    found = torch.linalg.lstsq(parts, theirs.flatten()[:, None]).solution
    rest = _measure_error(theirs, (parts @ found).view_as(theirs))
    solved = found.flatten().tolist()
    whole = [round(count) for count in solved]
    if not e.is_explained_error(rest) or any(abs(a - b) > _NEARLY for a, b in zip(solved, whole, strict=True)):
        return None
    by_count: dict[int, list[int]] = {}
    for microbatch, count in zip(shares, whole, strict=True):
        if count != 1 and microbatch is not None:
            by_count.setdefault(count, []).append(microbatch)
    if not by_count:
        return None
    wrong = [_name_count(e, count, those, set(shares)) for count, those in by_count.items()]
    return Cause(
        CauseName.MICROBATCHES,
        f"microbatches are not summed once each: {', '.join(wrong)}",
        evidence=(f"summed so, the error is {rest:.1e}",),
    )


def _project_gradient(values: Values) -> torch.Tensor:
    """The rows of a weight's gradient, projected; a bias's as it is."""
    if len(values.shape) > 1:
        return project_last(values, count_directions(values.count))
    return values.read(((0, values.count),))


def _list_shares(e: Evidence, whole: torch.Tensor) -> dict[int | None, torch.Tensor]:
    """What each microbatch adds to the reference's gradient: as recorded, or else made again for a linear layer.

    All are projected as the gradient itself is, `whole`.
    """
    own, shape = e.comparison.id, e.reference.shape
    recorded = _read_recorded(e.linear, own.name, Kind.PARAM_GRAD, finals=False)
    if recorded:
        return {microbatch: _project_gradient(values) for microbatch, values in recorded.items()}
    module = own.name.rpartition(".")[0]
    incoming, inputs = _read_recorded(e, module, Kind.GRAD_OUTPUT), _read_recorded(e, module, Kind.INPUT)
    made: dict[int | None, torch.Tensor] = {}
    for microbatch in incoming.keys() & inputs.keys():
        g, x = incoming[microbatch], inputs[microbatch]
        if len(shape) == 1 and g.shape[-1:] == shape and len(g.shape) > 1:
            made[microbatch] = _sum_vectors(g)  # of the bias
        elif len(shape) == 2 and shape == (*g.shape[-1:], *x.shape[-1:]):
            share = _multiply({microbatch: g}, {microbatch: x}, count_directions(e.stats.count))
            if share is not None:
                made[microbatch] = share
    is_whole = bool(made) and e.is_explained_error(_measure_error(whole, torch.stack(list(made.values())).sum(0)))
    return dict(sorted(made.items(), key=lambda item: item[0] or 0)) if is_whole else {}


def _sum_vectors(values: Values) -> torch.Tensor:
    total = torch.zeros(values.shape[-1], dtype=torch.float64, device="cpu")
    for bounds in values.cut():
        total[slice(*bounds[-1])] += values.read(bounds).flatten(0, -2).sum(0)
    return total


def _name_count(e: Evidence, count: int, microbatches: list[int], everything: set[int | None]) -> str:
    """How often some microbatches count, with the ranks that ran them if those ran no others."""
    ran, others = (_find_ranks(e, those) for those in (set(microbatches), everything - set(microbatches)))
    is_plural = len(microbatches) > 1
    which = f"microbatch{'es' * is_plural} {enumerate_few(microbatches)}"
    if ran and others and not ran & others:
        which += f" ({'those' if is_plural else 'that'} of {name_by_axis(ran, ran | others, e.mesh)[0]})"
    return f"{which} count{'s' * (not is_plural)} {count} times"


def _find_ranks(e: Evidence, microbatches: Collection[int | None]) -> set[int]:
    step, shards = e.comparison.id.step, e.candidate_trace.shards
    ids = (t for t in shards if t.step == step and t.microbatch in microbatches and t.kind is Kind.OUTPUT)
    return {shard.coord.rank for tensor_id in ids for shard in shards[tensor_id]}


@cause(
    CauseName.BACKWARD_LEFT_OUT,
    after="find_miscounted_microbatches",
    shown_by="the gradient before the backward of a softmax of the module's output",
    bug="loss-parallel-log-softmax",
)
def find_backward_left_out(e: Evidence) -> Cause | None:
    """Find the gradient before the backward of a softmax of the module's output."""
    own = e.comparison.id
    output = LogicalTensor.of(e.reference_trace, own.at(Kind.OUTPUT)) if own.kind is Kind.GRAD_OUTPUT else None
    if output is None or e.values is None or output.shape != e.reference.shape:
        return None
    scores = Values(output)
    for name in ("log-softmax", "softmax"):
        rest = e.measure_rest(partial(_go_back, scores, name))
        if e.is_explained_error(rest):
            return Cause(
                CauseName.BACKWARD_LEFT_OUT,
                f"the gradient is the one before the backward of a {name} along the last dim, which was left out",
                evidence=(f"after it, the error is {rest:.1e}",),
            )
    return None


def _go_back(scores: Values, name: str, block: Block) -> torch.Tensor:
    """What is left of a block after this backward."""
    p = scores.read(block.bounds).softmax(-1)
    theirs = block.theirs
    if name == "softmax":
        return p * (theirs - (p * theirs).sum(-1, keepdim=True)) - block.ours
    return theirs - p * theirs.sum(-1, keepdim=True) - block.ours


def _list_other_inputs(e: Evidence, module: str, inputs: Recorded) -> Iterator[tuple[str, Recorded]]:
    """Inputs that may have been taken for these: of one microbatch for all, or of the same module in another layer."""
    for microbatch, x in inputs.items() if len(inputs) > 1 else ():
        yield f"the input of microbatch {microbatch}", dict.fromkeys(inputs, x)
    pattern = drop_numbers(module)
    for name in dict.fromkeys(t.name for t in e.reference_trace.shards if t.kind is Kind.INPUT):
        if name != module and drop_numbers(name) == pattern:
            yield f"the input of {name}", _read_recorded(e, name, Kind.INPUT)


def _read_recorded(e: Evidence, module: str, kind: Kind, *, finals: bool = True) -> Recorded:
    """The reference's tensors at a module that is called once a microbatch and takes and gives one; else nothing."""
    step = e.comparison.id.step
    ids = [t for t in e.reference_trace.shards if t.name == module and t.kind is kind and t.step == step]
    ids = [t for t in ids if finals or t.microbatch is not None]
    if len({t.microbatch for t in ids}) != len(ids):
        return {}
    found = {t.microbatch: LogicalTensor.of(e.reference_trace, t) for t in ids}
    return {microbatch: e.make_values(logical) for microbatch, logical in found.items() if logical is not None}


def _multiply(incoming: Recorded, inputs: Recorded, num_directions: int) -> torch.Tensor | None:
    """The rows of the gradient of a linear layer's weight, projected."""
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
    return float((a - b).norm() / a.norm().clamp_min(1e-300)) if a.shape == b.shape else 1.0
