"""Measurement of how well the twins predict the error of clean candidates, tensor by tensor.

The ratio is the observed error over the estimate, max(error of the twins, floor); tolerance is the margin, 4, times
the estimate. Tensors that are bitwise equal prove nothing and are counted separately. References are GPT-, Llama- and
MoE-shaped, in fp32, bf16 and torchao's float8, emulated. Candidates are arithmetic equivalents in this process, with
every sum in parts that a parallelism would take in parts (`bench/_models.py`), and real ranks (`bench/_ranks.py`).
`--trained` measures small models that were trained on text, with their own weights (`bench/_trained.py`).
`--all` goes from 2 to 128 layers and draws the figures of docs/explanation/tolerance.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from bench._figures import Curve, draw
from bench._models import (
    CUTS,
    FAMILIES,
    FEW,
    PRECISIONS,
    Bed,
    Change,
    Model,
    bed,
    forget_reductions,
    shift_vocabulary,
)
from bench._ranks import BF16, FP32, Case, cases, judged_on_ranks
from bench._trained import judge_trained
from ttrace.judge.check import judge_candidate
from ttrace.judge.margin import MARGIN
from ttrace.judge.tolerance.twins import unit
from ttrace.judge.verdict import Comparison, Judgement, Tolerance, Verdict
from ttrace.layouts.ids import Kind, TensorId

BAR = 20_000
"""How many tensors must have been compared, all within the margin."""
TRAINED_BAR = 2.5
"""The largest ratio that is allowed with trained weights."""
WIDE = [Model("llama", precision, 2, is_wide=True) for precision in PRECISIONS]
SMALL = [*(Model(family, precision, 6) for family in FAMILIES for precision in PRECISIONS), WIDE[0]]
DEEPEST = [*(Model(family, "bf16", 128) for family in FAMILIES), Model("llama", "fp8", 128)]
FAULTY = Model("llama", "bf16", 32)
ALL = [
    *(Model(family, precision, depth) for family in FAMILIES for precision in PRECISIONS for depth in (2, 8, 32)),
    *(Model("llama", "bf16", depth) for depth in (4, 16, 64)),
    *WIDE,
    *DEEPEST,
]
WIDE_RANKS = [Case(layout, FP32, 2, is_wide=True) for layout in ("tp+sp", "tp", "fsdp", "cp-gather", "ep")]
RANKS = [
    *(Case("gpt", dtype, 3) for dtype in (FP32, BF16)),
    *cases(4, ("tp", "ddp", "pp-1f1b", "cp-gather", "ep")),
    WIDE_RANKS[0],
]
ALL_RANKS = [
    *RANKS,
    *WIDE_RANKS[1:],
    *cases(4, ("tp+sp", "fsdp", "cp-ring")),
    *cases(32, ("tp", "ddp", "pp-1f1b", "cp-gather")),
]
FAULTS: dict[Kind, tuple[str, Change]] = {
    Kind.OUTPUT: ("vocabulary shard off by one", shift_vocabulary),
    Kind.GRAD_OUTPUT: ("missing all-reduce", forget_reductions),
    Kind.PARAM_GRAD: ("missing all-reduce", forget_reductions),
}
TITLES = {Kind.OUTPUT: "outputs", Kind.GRAD_OUTPUT: "gradients of outputs", Kind.PARAM_GRAD: "parameter gradients"}
HEAD = "| model | tensors | bitwise equal | 50% | 99% | 99.9% | max |\n|---|---|---|---|---|---|---|"


@dataclass
class Tally:
    """The ratios of all tensors that were judged, how many were equal, and what was accused by mistake."""

    ratios: list[float] = field(default_factory=list)
    num_equal: int = 0
    accused: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, judgement: Judgement) -> Tally:
        judged = [c for c in judgement.comparisons if c.tolerance is not None and c.verdict is not Verdict.UNJUDGED]
        return cls(
            [ratio for c in judged if (ratio := ratio_of(c)) is not None],
            sum(c.error == 0.0 for c in judged),
            [f"{finding.comparison.id}: {finding.cause.sentence}" for finding in judgement.findings]
            + [f"{c.id} is {c.verdict}" for c in judged if c.verdict.is_wrong],
        )

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.ratios + other.ratios, self.num_equal + other.num_equal, self.accused + other.accused)

    def row(self, name: str) -> str:
        cuts = statistics.quantiles(self.ratios, n=1000, method="inclusive") if len(self.ratios) > 1 else [0.0] * 999
        figures = " | ".join(f"{cuts[at - 1]:.2f}" for at in (500, 990, 999))
        return f"| {name} | {len(self.ratios)} | {self.num_equal} | {figures} | {max(self.ratios, default=0.0):.2f} |"


def ratio_of(comparison: Comparison) -> float | None:
    """Observed over estimated error; None for what is equal, and for choices, which have no error to estimate."""
    tolerance = comparison.tolerance
    if tolerance is None or comparison.error == 0.0 or tolerance.value == 0.0:
        return None
    return comparison.error / tolerance.value * MARGIN


def tallied(found: Bed) -> Tally:
    """A model's clean candidates."""
    cuts = CUTS if found.model.num_layers in (2, 8) else FEW
    return sum((Tally.of(judge_candidate(found.twins, found.candidate(cut))) for cut in cuts.values()), Tally())


def print_row(name: str, tally: Tally) -> Tally:
    """The same with the model's name in what was accused, after printing its row."""
    print(tally.row(name), flush=True)
    return replace(tally, accused=[f"{name}: {words}" for words in tally.accused])


def curve(errors: Mapping[TensorId, float], kind: Kind, style: str = "-") -> Curve:
    """By layer, the error of its output or of the gradient of that, or the median over its parameters' gradients."""
    layers: dict[int, list[float]] = {}
    for tensor_id, error in errors.items():
        first, _, rest = tensor_id.name.partition(".")
        number, _, inner = rest.partition(".")
        is_final = tensor_id.microbatch is None if kind is Kind.PARAM_GRAD else not inner
        if first == "layers" and tensor_id.kind is kind and is_final:
            layers.setdefault(int(number), []).append(error / unit(torch.bfloat16))
    return Curve([statistics.median(layers[layer]) for layer in sorted(layers)], style)


def estimates(tolerances: Mapping[TensorId, Tolerance]) -> dict[TensorId, float]:
    return {tensor_id: tolerance.twin_error for tensor_id, tolerance in tolerances.items()}


def errors(judgement: Judgement) -> dict[TensorId, float]:
    return {comparison.id: comparison.error for comparison in judgement.comparisons}


def faults_by_layer(found: Bed) -> dict[str, dict[str, Curve]]:
    """What a fault does to each layer beside what rounding does, by kind."""
    estimated = estimates(found.twins.tolerances)
    observed = errors(judge_candidate(found.twins, found.candidate(CUTS["tp=2 cp=2"])))
    panels = {}
    for kind, (name, fault) in FAULTS.items():
        wrong = errors(judge_candidate(found.twins, found.candidate(CUTS["tp=2"], broken=fault)))
        panels[TITLES[kind]] = {
            f"fault: {name}": curve(wrong, kind),
            "rounding, observed": curve(observed, kind),
            "rounding, estimated": curve(estimated, kind, "--"),
        }
    return panels


def sampled(curves: Mapping[str, Mapping[str, Curve]]) -> Iterator[str]:
    """A table of curves at layers 1, 2, 4 and so on."""
    depth = max(len(one.errors) for by_model in curves.values() for one in by_model.values())
    places = [2**power for power in range(depth.bit_length())]
    yield f"| in units of u, layer | {' | '.join(map(str, places))} |\n|---|{'---|' * len(places)}"
    for title, by_model in curves.items():
        for name, one in by_model.items():
            yield f"| {title}, {name} | {' | '.join(f'{one.errors[at - 1]:.1f}' for at in places)} |"


def calibrate_trained() -> int:
    """Measure models that were trained on text; print the largest ratio."""
    total = Tally()
    print(f"observed / estimated error, trained on text\n\n{HEAD}")
    for name, tally in judge_trained((torch.float32, torch.bfloat16), Tally.of):
        total += print_row(name, tally)
    print(total.row("all"), end="\n\n")
    print(*total.accused, sep="\n", end="\n" if total.accused else "")
    largest = max(total.ratios)
    print(
        f"calibration --trained: {largest:.2f} at most, median {statistics.median(total.ratios):.2f}, of "
        f"{len(total.ratios)} tensors; {len(total.accused)} accused (bars: {TRAINED_BAR}, 0)"
    )
    return int(largest > TRAINED_BAR or bool(total.accused))


def main(*options: str) -> int:
    torch.set_num_threads(1)
    if "--trained" in options:
        return calibrate_trained()
    everything = "--all" in options
    total = Tally()
    faults: dict[str, dict[str, Curve]] = {}
    depth: dict[str, dict[str, Curve]] = {TITLES[kind]: {} for kind in (Kind.OUTPUT, Kind.PARAM_GRAD)}
    print(f"observed / estimated error\n\n{HEAD}")
    for model in ALL if everything else SMALL:
        with bed(model) as found:
            total += print_row(model.name, tallied(found))
            if everything and model in DEEPEST:
                for kind in (Kind.OUTPUT, Kind.PARAM_GRAD):
                    depth[TITLES[kind]][model.name] = curve(estimates(found.twins.tolerances), kind)
            if everything and model == FAULTY:
                faults = faults_by_layer(found)
    ranks = ALL_RANKS if everything else RANKS
    for case, tally in zip(ranks, judged_on_ranks(ranks, Tally.of), strict=True):
        total += print_row(case.name, tally)
    print(total.row("all"), end="\n\n")
    if everything:
        for name, curves in (("depth", depth), ("faults", faults)):
            print(*sampled(curves), sep="\n", end="\n\n")
            draw(name, curves)
    print(*total.accused, sep="\n", end="\n" if total.accused else "")
    over = sum(ratio > MARGIN for ratio in total.ratios)
    print(
        f"calibration: {over} of {len(total.ratios)} tensors above the margin of {MARGIN:g}, {len(total.accused)} "
        f"accused (bars: 0 of at least {BAR}, 0)"
    )
    return int(over > 0 or bool(total.accused) or len(total.ratios) < BAR)
