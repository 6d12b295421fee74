"""Fixed tolerances and TTrace's on the same traces: clean runs accused, injected faults missed.

The rules are those of zoo/fixed.py, which the zoo's evaluation applies to real bugs too.
"""

from __future__ import annotations

import torch
from torch import nn

from bench._models import CUTS, FAMILIES, Bed, Change, Model, bed
from ttrace.judge.check import judge_candidate
from ttrace.judge.verdict import Exit
from ttrace.trace.reader import Trace
from zoo.fixed import FIXED, accusers

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


def accusing(found: Bed, candidate: Trace) -> set[str]:
    """The rules that accuse a candidate, ours included."""
    ours = set() if judge_candidate(found.twins, candidate).exit is Exit.PASSED else {OURS}
    return ours | accusers(found.twins.reference, candidate)


def main(*_: str) -> int:
    torch.set_num_threads(1)
    clean: list[set[str]] = []
    wrong: list[set[str]] = []
    for family in FAMILIES:
        for precision in ("fp32", "bf16"):
            with bed(Model(family, precision, 3)) as found:
                clean += [accusing(found, found.candidate(cut)) for cut in CUTS.values()]
                wrong += [accusing(found, found.candidate(CUTS["tp=2"], fault)) for fault in FAULTS.values()]
    print(f"| tolerance | clean runs accused, of {len(clean)} | faults missed, of {len(wrong)} |\n|---|---|---|")
    for name in (*FIXED, OURS):
        print(f"| {name} | {sum(name in found for found in clean)} | {sum(name not in found for found in wrong)} |")
    false, missed = sum(OURS in found for found in clean), sum(OURS not in found for found in wrong)
    print(f"tolerances: {false} of {len(clean)} clean runs accused, {missed} of {len(wrong)} faults missed (bars 0, 0)")
    return int(false > 0 or missed > 0)
