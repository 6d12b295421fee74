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


def _draw_panel(axes: Axes, title: str, curves: Mapping[str, Curve]) -> None:
    for name, curve in curves.items():
        axes.plot(range(1, len(curve.errors) + 1), curve.errors, curve.style, label=name, linewidth=1.2)
    axes.axhline(1.0, color="black", linestyle=":", linewidth=0.8)
    axes.set(title=title, xlabel="layer", xscale="log", yscale="log")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
