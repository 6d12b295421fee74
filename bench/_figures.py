"""Figures of errors by depth for the docs: small SVGs, the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[1] / "docs" / "explanation" / "figures"
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ttrace", "font.size": 9, "axes.grid": True})


@dataclass(frozen=True)
class Curve:
    """Errors along the layers of a model, the first layer's first, in units of bf16's u."""

    errors: Sequence[float]
    style: str = "-"


def draw(name: str, panels: Mapping[str, Mapping[str, Curve]]) -> None:
    """One panel beside the other, each with the curves by name, both axes logarithmic."""
    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    found = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, (title, curves) in zip(found[0], panels.items(), strict=True):
        _draw_panel(axes, title, curves)
    found[0][0].set_ylabel("relative error, in units of bf16's u (0.39%)")
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


def draw_growth(name: str, by_size: Sequence[Mapping[str, float]], by_ranks: Sequence[Mapping[str, float]]) -> None:
    """Draw time and memory against the size of a model, and against the number of ranks."""
    figure = Figure(figsize=(12.6, 3.4), layout="constrained")
    times, memory, ranks = figure.subplots(1, 3)
    sizes = [row["parameters"] for row in by_size]
    for key, label in (("bare step s", "bare step"), ("traced step s", "traced step"), ("check s", "check")):
        times.plot(sizes, [row[key] for row in by_size], "o-", label=label, linewidth=1.2, markersize=3)
    times.set(title="seconds, recorded in full", xlabel="parameters", xscale="log", yscale="log")
    memory.plot(sizes, [row["disk bytes"] / 2**20 for row in by_size], "o-", label="trace on disk", markersize=3)
    for key, label in (("capture memory", "memory of capture"), ("check memory", "memory of the check")):
        memory.plot(sizes, [max(row[key] / 2**20, 1) for row in by_size], "o-", label=label, markersize=3)
    memory.set(title="MiB", xlabel="parameters", xscale="log", yscale="log")
    numbers = [row["ranks"] for row in by_ranks]
    ranks.plot(numbers, [row["seconds"] for row in by_ranks], "o-", label="seconds to plan a check", markersize=3)
    ranks.plot(numbers, [row["bytes"] / 2**20 for row in by_ranks], "o-", label="its memory in MiB", markersize=3)
    ranks.set(title="traces of many ranks", xlabel="ranks", xscale="log", yscale="log")
    for axes in (times, memory, ranks):
        axes.legend(fontsize=8)
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


def _draw_panel(axes: Axes, title: str, curves: Mapping[str, Curve]) -> None:
    for name, curve in curves.items():
        axes.plot(range(1, len(curve.errors) + 1), curve.errors, curve.style, label=name, linewidth=1.2)
    axes.axhline(1.0, color="black", linestyle=":", linewidth=0.8)
    axes.set(title=title, xlabel="layer", xscale="log", yscale="log")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
