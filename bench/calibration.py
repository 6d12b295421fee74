"""This module measures how well the twins foretell the error of clean candidates, tensor by tensor.

The ratio is the observed error over the estimate, max(error of the twins, floor); tolerance is the margin, 4, times
the estimate. Tensors that are bitwise equal prove nothing and are left out. References are GPT-, Llama- and MoE-shaped,
2 to 128 layers deep, in fp32, bf16 and torchao's float8, emulated. Candidates are arithmetic equivalents in this
process: every sum that a parallelism would take in parts is taken in parts (`bench/_models.py`). Pipelining changes no
sum, so its clean candidate would be the reference again. Real processes are held against the same tolerances by
tests/matrix. `--quick` leaves out all that is deeper than 8 layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from bench._models import CUTS, FAMILIES, Bed, Cut, Model, bed
from ttrace.judge.check import checked
from ttrace.judge.tolerance import MARGIN
from ttrace.judge.verdict import Comparison, Verdict
from ttrace.tensors.ids import Kind

BAR = 20_000
"""How many tensors must have been compared, all within the margin."""
SHALLOW = [
    Model(family, precision, depth) for family in FAMILIES for precision in ("fp32", "bf16", "fp8") for depth in (2, 8)
]
DEEP = [*(Model(family, "bf16", 32) for family in FAMILIES), Model("llama", "fp8", 32), Model("llama", "bf16", 128)]


@dataclass
class Tally:
    """The ratios of all tensors that were judged, and what was accused by mistake."""

    ratios: list[float] = field(default_factory=list)
    accused: list[str] = field(default_factory=list)

    def add(self, found: Bed, name: str, candidate: Cut) -> None:
        judgement = checked(found.twins, found.candidate(candidate))
        self.ratios += [ratio for c in judgement.comparisons if (ratio := ratio_of(c)) is not None]
        where = f"{found.model.name} {name}"
        self.accused += [f"{where}: {f.comparison.id}: {f.cause.sentence}" for f in judgement.findings]
        self.accused += [f"{where}: {c.id} is {c.verdict}" for c in judgement.comparisons if c.verdict.is_wrong]


def ratio_of(comparison: Comparison) -> float | None:
    """Observed over estimated error; None for what is equal, or not judged."""
    tolerance = comparison.tolerance
    if tolerance is None or comparison.error == 0.0 or comparison.verdict is Verdict.UNJUDGED:
        return None
    return comparison.error / tolerance.value * MARGIN


def row(name: str, ratios: Sequence[float]) -> str:
    cuts = statistics.quantiles(ratios, n=1000)
    figures = " ".join(f"{cuts[at - 1]:>6.2f}" for at in (500, 990, 999))
    return f"{name:<16} {len(ratios):>7} {figures} {max(ratios):>6.2f}"


def curve(found: Bed) -> Iterator[str]:
    """The estimated error of every layer's output and of a weight's gradient in it, in units of u."""
    known = found.twins.tolerances
    for layer in sorted({int(t.name.split(".")[1]) for t in known if t.name.startswith("layers.")}):
        if (layer + 1) & layer and layer + 1 != found.model.num_layers:
            continue
        of_layer = {t: tolerance for t, tolerance in known.items() if t.name.startswith(f"layers.{layer}.")}
        output = next(known[t] for t in known if t.name == f"layers.{layer}" and t.kind is Kind.OUTPUT)
        grads = [tolerance for t, tolerance in of_layer.items() if t.kind is Kind.PARAM_GRAD and t.microbatch is None]
        gradient = statistics.median(tolerance.twin_error for tolerance in grads)
        u = output.floor
        yield f"  layer {layer + 1:>3}: output {output.twin_error / u:>5.2f} u, weight gradients {gradient / u:>5.2f} u"


def main(*options: str) -> int:
    torch.set_num_threads(1)
    models = SHALLOW if "--quick" in options else [*SHALLOW, *DEEP]
    total = Tally()
    print(f"{'model':<16} {'tensors':>7} {'50%':>6} {'99%':>6} {'99.9%':>6} {'max':>6}   observed / estimated error")
    for model in models:
        with bed(model) as found:
            tally = Tally()
            for name, cut in CUTS.items():
                tally.add(found, name, cut)
            print(row(model.name, tally.ratios), flush=True)
            if model.num_layers >= 32:
                print("\n".join(curve(found)), flush=True)
        total.ratios += tally.ratios
        total.accused += tally.accused
    print(*total.accused, sep="\n", end="\n" if total.accused else "")
    over = sum(ratio > MARGIN for ratio in total.ratios)
    print(row("all", total.ratios))
    print(
        f"calibration: {over} of {len(total.ratios)} tensors above the margin of {MARGIN:g}, {len(total.accused)} "
        f"accused (bars: 0 of at least {BAR}, 0)"
    )
    return int(over > 0 or bool(total.accused) or len(total.ratios) < BAR)
