"""Fixed tolerances of other tools, applied to the traces that TTrace judges.

A rule accuses a run if any of its tensors breaks the rule. Rules get the tensors that TTrace has assembled: shards are
merged, pending sums are added, factors still to come are applied, and every replica is compared. Updates are left out
in favour of the rules, because rounding alone decides some of their elements; parameters after the step are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ttrace.judge.tensors.logical import LogicalTensor, Piece, factor_to_come
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace

Rule = Callable[[torch.Tensor, torch.Tensor], bool]
"""Whether two tensors agree."""
SEEN = frozenset(
    {Kind.INPUT, Kind.OUTPUT, Kind.LOSS, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT}
    | {Kind.PARAM, Kind.PARAM_GRAD, Kind.GRAD_NORM, Kind.PARAM_AFTER}
)


def close(a: torch.Tensor, b: torch.Tensor, *, atol: float, rtol: float) -> bool:
    return torch.allclose(b, a, atol=atol, rtol=rtol)


def within(a: torch.Tensor, b: torch.Tensor, *, bound: float) -> bool:
    """Relative error within one bound, as Megatron-LM's formula gives for bf16."""
    return bool((a - b).norm() <= bound * a.norm())


def quadratic(a: torch.Tensor, b: torch.Tensor, *, bound: float) -> bool:
    """1 - 2 <a, b> / (<a, a> + <b, b>) within a bound, as sglang compares dumps."""
    total = float((a * a + b * b).sum())
    return total == 0.0 or 1 - 2 * float((a * b).sum()) / total <= bound


def cosine(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The angle together with the largest difference, as msprobe's table says "yes" or "no"."""
    sizes = float(a.norm() * b.norm())
    angle = float((a * b).sum()) / sizes if sizes else float(torch.equal(a, b))
    largest = float((a - b).abs().max())
    return angle >= 0.9 and largest <= 1.0 and (angle >= 0.99 or largest <= 0.001)


FIXED: dict[str, Rule] = {
    **{
        f"torch.allclose atol={atol:g} rtol={rtol:g}": functools.partial(close, atol=atol, rtol=rtol)
        for atol, rtol in ((0.0, 1e-5), (1e-8, 1e-5), (1e-5, 1e-2), (1e-2, 1e-1))
    },
    "relative error 8.3% (Megatron-LM)": functools.partial(within, bound=0.083),
    "quadratic 1e-3 (sglang)": functools.partial(quadratic, bound=1e-3),
    "cosine 0.99 and largest difference (msprobe)": cosine,
}


def accusers(reference: Trace, candidate: Trace) -> frozenset[str]:
    """Return the names of the rules that accuse a candidate."""
    accusing: set[str] = set()
    for a, b in _pairs(reference, candidate):
        accusing |= {name for name, rule in FIXED.items() if name not in accusing and not rule(a, b)}
        if len(accusing) == len(FIXED):
            break
    return frozenset(accusing)


def _pairs(reference: Trace, candidate: Trace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tensors that both sides have, each replica separately."""
    for tensor_id in reference.shards:
        ours = LogicalTensor.of(reference, tensor_id) if tensor_id.kind in SEEN else None
        theirs = LogicalTensor.of(candidate, tensor_id, ours.shape) if ours is not None else None
        if ours is None or theirs is None or ours.shape != theirs.shape or not ours.dtype.is_floating_point:
            continue
        a, factor = ours.tensor().double(), factor_to_come(tensor_id, reference, candidate)
        if a.numel() and bool(a.isfinite().all()):
            yield from ((a, one.tensor().double() * factor) for one in _replicas(theirs))


def _replicas(logical: LogicalTensor) -> Iterator[LogicalTensor]:
    """The same tensor as the first holders of each part have it, as the second have it, and so on."""
    count = max(len(replicas) for piece in logical.pieces for replicas in piece.summands)
    for i in range(count):
        yield replace(logical, pieces=tuple(_held_by(piece, i) for piece in logical.pieces))


def _held_by(piece: Piece, number: int) -> Piece:
    return Piece(piece.region, tuple((replicas[min(number, len(replicas) - 1)],) for replicas in piece.summands))
