"""Predicted cost of streamed references of large models, compared with measurements.

A step of few tokens reads its weights and does little with them, so its time is proportional to the parameters it uses:
each is generated twice, read three times, and its gradient is written and sketched once. One constant, fitted to the
two smallest models, must predict the others. How many parameters a step uses follows from the model's shape: all but
those of words that do not occur and of experts that receive no token, if tokens choose among experts evenly. Measured
runs are in docs/measured, each with the command that made it (`python -m bench streamed --model NAME --out FILE`).
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench._large import MODELS, Large

MEASURED = Path(__file__).parents[1] / "docs" / "measured"
FITTED = ("llama-8b", "deepseek-16b")
OFF = 1.5
"""The bar: the largest factor between predicted and measured time."""
NUM_TOKENS, MANY_TOKENS = 64, 8192
BYTES = 2
"""Of a number in bf16."""
GIB, GB = 2**30, 1e9
DOLLARS_PER_CORE_HOUR, DOLLARS_PER_GB_MONTH = 0.05, 0.023
"""Approximate prices of large clouds for a core with its memory, and for an object store."""
PAPER_MINUTES = {
    "llama-8b": 1.8,
    "llama-70b": 7.2,
    "llama-405b": 17.1,
    "deepseek-16b": 2.8,
    "deepseek-236b": 15.2,
    "deepseek-v3": 22.7,
}
"""Of its table of references that do not fit on one device: pipelined, on GPUs."""


@dataclass(frozen=True)
class Shape:
    """What can be said of a model without running it."""

    num_parameters: int
    num_used: float

    @classmethod
    def of(cls, large: Large) -> Shape:
        with torch.device("meta"):
            model = large.build()
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        experts = sum(numel for name, numel in sizes.items() if ".experts." in name and ".shared_" not in name)
        words = next(numel for name, numel in sizes.items() if "embed_tokens" in name)
        total = sum(sizes.values())
        used = total - words * (1 - NUM_TOKENS / large.vocab) - experts * (1 - _share(large))
        return cls(total, used)


def _share(large: Large) -> float:
    """Of the experts, those that any token goes to if all are as likely."""
    top, num_experts = large.settings.get("num_experts_per_tok", 1), large.settings.get("n_routed_experts", 1)
    return float(1 - (1 - top / num_experts) ** NUM_TOKENS)


def measured() -> dict[str, dict[str, Any]]:
    found = (json.loads(path.read_text()) for path in sorted(MEASURED.glob("streamed-*.json")))
    return {run["model"]: run for run in found if run["num_layers"] == MODELS[run["model"]].num_layers}


def dollars(seconds: float, num_cores: int) -> float:
    return seconds / 3600 * num_cores * DOLLARS_PER_CORE_HOUR


def main() -> int:
    runs, shapes = measured(), {name: Shape.of(large) for name, large in MODELS.items()}
    rate = statistics.mean(runs[name]["seconds"] / shapes[name].num_used for name in FITTED)
    print("| model | parameters | used | predicted | measured | peak memory | the paper, on GPUs | two cores cost |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    factors = {}
    for name, shape in shapes.items():
        run, seconds = runs.get(name), rate * shape.num_used
        if run is not None and name not in FITTED:
            factors[name] = max(seconds / run["seconds"], run["seconds"] / seconds)
        took = f"{run['seconds'] / 60:.1f} min | {run['peak_gib']:.1f} GiB" if run else "not run |"
        print(
            f"| {name} | {shape.num_parameters / 1e9:.1f}B | {shape.num_used / 1e9:.1f}B | {seconds / 60:.1f} min | "
            f"{took} | {PAPER_MINUTES[name]:.1f} min | ${dollars(run['seconds'] if run else seconds, 2):.3f} |"
        )
    print(
        "\n| trace of one step | full, 64 tokens | full, 8,192 tokens | sketches | a month of the last two in a store |"
    )
    print("|---|--:|--:|--:|--:|")
    for name, run in runs.items():
        activations = max(run["full_gib"] * GIB - BYTES * run["num_used"], 0.0) / NUM_TOKENS
        many = BYTES * run["num_parameters"] + MANY_TOKENS * activations
        full, sketches = many / GB * DOLLARS_PER_GB_MONTH, run["trace_mib"] * 2**20 / GB * DOLLARS_PER_GB_MONTH
        print(
            f"| {name} | {run['full_gib']:.1f} GiB | {many / GIB:.0f} GiB | {run['trace_mib']:.1f} MiB | "
            f"${full:.2f} and ${sketches:.4f} |"
        )
    worst = max(factors.values(), default=float("inf"))
    print(
        f"cost: {rate * 1e9:.2f} s per 10^9 parameters used, fitted to {' and '.join(FITTED)}; {len(factors)} others "
        f"predicted within a factor of {worst:.2f} (bar {OFF})"
    )
    return int(worst > OFF)
