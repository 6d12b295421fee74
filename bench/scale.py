"""Wrong factors below rounding noise that the scale finds, and clean runs, which it must not accuse.

Clean runs in fp32 and bf16, several seeds of GPT-, Llama- and MoE-shaped models of three layers, whose products are cut
as parallelisms cut them. In bf16 the same with all gradients mis-scaled: all of backward, or only the final gradients.
`--all` takes seven seeds instead of one.
"""

from __future__ import annotations

import statistics
from collections import Counter

import torch

from bench._models import CUTS, FAMILIES, Bed, Model, bed
from bench.tolerances import scaled
from ttrace.judge.check import judge_candidate
from ttrace.judge.verdict import Exit
from ttrace.layouts.ids import Kind

NUM_SEEDS = 7
FACTORS = (0.995, 0.997, 0.998, 0.999)
"""All gradients times this; the first must always be found."""
WEIGHT, EXPERTS = 0.015, 0.15
"""The bars of the median smallest visible mis-scaling of one weight, and of a mixture's error tolerance."""


def weights(found: Bed) -> list[tuple[float, float]]:
    """Of each weight matrix's gradient: the smallest mis-scaling that is seen, and the tolerance of its error."""
    ids = [t for t in found.twins.tolerances if t.kind is Kind.PARAM_GRAD and t.microbatch is None]
    matrices = [found.twins.tolerances[t] for t in ids if len(found.twins.reference.shards[t][0].record.shape) > 1]
    return [(min(tolerance.scale, tolerance.value), tolerance.value) for tolerance in matrices]


def main(*options: str) -> int:
    torch.set_num_threads(1)
    seeds = range(NUM_SEEDS if "--all" in options else 1)
    accused, seen = Counter[str](), Counter[float]()
    num_clean = num_wrong = 0
    visible: list[float] = []
    allowed: list[float] = []
    for model in (Model(f, p, 3, seed) for seed in seeds for f in FAMILIES for p in ("fp32", "bf16")):
        with bed(model) as found:
            exits = [judge_candidate(found.twins, found.candidate(cut)).exit for cut in CUTS.values()]
            num_clean += len(exits)
            accused[model.precision] += sum(code is not Exit.PASSED for code in exits)
            if model.precision == "bf16":
                visible += [scale for scale, _ in weights(found)]
                allowed += [error for _, error in weights(found)] if model.family == "moe" else []
                num_wrong += 2
                for factor in FACTORS:
                    wrong = (
                        found.candidate(CUTS["tp=2"], backward=factor),
                        found.candidate(CUTS["tp=2"], scaled("", factor)),
                    )
                    seen[factor] += sum(judge_candidate(found.twins, trace).exit is Exit.FOUND for trace in wrong)
        print(f"{model.name} seed {model.seed}: {dict(seen)}", flush=True)
    for factor in FACTORS:
        print(f"all gradients x {factor} in bf16: found in {seen[factor]} of {num_wrong} runs")
    weight, experts = statistics.median(visible), statistics.median(allowed)
    print(
        f"scale: {sum(accused.values())} of {num_clean} clean runs accused, {seen[FACTORS[0]]} of {num_wrong} runs x "
        f"{FACTORS[0]} found, one weight visible from {weight:.2%}, experts' tolerance {experts:.3f} "
        f"(bars: 0, all, {WEIGHT:.1%}, {EXPERTS})"
    )
    missed = num_wrong - seen[FACTORS[0]]
    return int(bool(sum(accused.values()) or missed) or weight > WEIGHT or experts > EXPERTS)
