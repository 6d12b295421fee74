"""This module holds fixed tolerances against TTrace's on the same traces: clean runs accused, injected faults missed.

A rule accuses a run if any tensor of it breaks the rule. Fixed rules see activations, their gradients and those of the
parameters; updates are left out in their favour, as rounding alone decides some elements of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from bench._models import CUTS, FAMILIES, Bed, Change, Model, bed
from ttrace.judge.check import checked
from ttrace.judge.logical import Logical
from ttrace.judge.verdict import Exit
from ttrace.tensors.ids import Kind
from ttrace.trace.reader import Trace

Rule = Callable[[torch.Tensor, torch.Tensor], bool]
"""Whether two tensors agree."""
SEEN = frozenset({Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.PARAM_GRAD})


def close(a: torch.Tensor, b: torch.Tensor, *, atol: float, rtol: float) -> bool:
    return torch.allclose(b, a, atol=atol, rtol=rtol)


def within(a: torch.Tensor, b: torch.Tensor, *, bound: float) -> bool:
    """Relative error within one bound, as Megatron-LM's formula gives for bf16."""
    return bool((a - b).norm() <= bound * a.norm())


def quadratic(a: torch.Tensor, b: torch.Tensor, *, bound: float) -> bool:
    """1 - 2 <a, b> / (<a, a> + <b, b>) within a bound, as sglang compares dumps."""
    total = float((a * a + b * b).sum())
    return total == 0.0 or 1 - 2 * float((a * b).sum()) / total <= bound


FIXED: dict[str, Rule] = {
    **{
        f"torch.allclose atol={atol:g} rtol={rtol:g}": partial(close, atol=atol, rtol=rtol)
        for atol, rtol in ((0.0, 1e-5), (1e-8, 1e-5), (1e-5, 1e-2), (1e-2, 1e-1))
    },
    "relative error 8.3% (Megatron-LM)": partial(within, bound=0.083),
    "quadratic 1e-3 (sglang)": partial(quadratic, bound=1e-3),
}
OURS = "TTrace"


def scaled(pattern: str, factor: float) -> Change:
    """Multiply the gradients of the parameters whose name contains a pattern."""

    def change(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if pattern in name and parameter.grad is not None:
                parameter.grad.mul_(factor)

    return change


def lost_row(model: nn.Module) -> None:
    """A vocabulary shard's first row never gets its gradient."""
    weight = list(model.parameters())[-1]
    assert weight.grad is not None
    weight.grad[31] = 0.0


FAULTS: dict[str, Change] = {
    "gradients not averaged over dp=2": scaled("", 2.0),
    "a layer's gradients without half of their tokens": scaled("layers.1.", 0.5),
    "one layer's gradients 4% off": scaled("layers.1.", 1.04),
    "all gradients 0.5% off": scaled("", 0.995),
    "one row of the head's gradient lost": lost_row,
}


def accusers(found: Bed, candidate: Trace) -> set[str]:
    """The rules that accuse a candidate."""
    accusing = set() if checked(found.twins, candidate).exit is Exit.PASSED else {OURS}
    for tensor_id in found.twins.reference.shards:
        ours, theirs = (Logical.found(trace, tensor_id) for trace in (found.twins.reference, candidate))
        if tensor_id.kind in SEEN and ours is not None and theirs is not None and ours.dtype.is_floating_point:
            a, b = ours.tensor().double(), theirs.tensor().double()
            accusing |= {name for name, rule in FIXED.items() if name not in accusing and not rule(a, b)}
    return accusing


def main(*_: str) -> int:
    torch.set_num_threads(1)
    clean: list[set[str]] = []
    wrong: list[set[str]] = []
    for family in FAMILIES:
        for precision in ("fp32", "bf16"):
            with bed(Model(family, precision, 3)) as found:
                clean += [accusers(found, found.candidate(cut)) for cut in CUTS.values()]
                wrong += [accusers(found, found.candidate(CUTS["tp=2"], fault)) for fault in FAULTS.values()]
    print(f"| tolerance | clean runs accused, of {len(clean)} | faults missed, of {len(wrong)} |\n|---|---|---|")
    for name in (*FIXED, OURS):
        print(f"| {name} | {sum(name in found for found in clean)} | {sum(name not in found for found in wrong)} |")
    false, missed = sum(OURS in found for found in clean), sum(OURS not in found for found in wrong)
    print(f"tolerances: {false} of {len(clean)} clean runs accused, {missed} of {len(wrong)} faults missed (bars 0, 0)")
    return int(false > 0 or missed > 0)
