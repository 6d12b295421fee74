"""Verdicts, and curves of errors and tolerances along the depth of a model, for TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrace.errors import TTraceError
from ttrace.judge.verdict import Comparison, Judgement
from ttrace.layouts.ids import Kind
from ttrace.report.terminal.depth import Depth

_CURVES = {
    "forward": (Kind.OUTPUT,),
    "backward": (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT),
    "gradients": (Kind.PARAM_GRAD,),
    "updates": (Kind.UPDATE,),
}


@dataclass(frozen=True)
class Point:
    """The worst tensor of one kind at one place."""

    curve: str
    depth: int
    """The place along the model, in the order of the forward pass."""
    name: str
    """The module or parameter."""
    error: float
    tolerance: float


def list_points(comparisons: Sequence[Comparison]) -> list[Point]:
    """List the points of all curves, each curve in the order of depth."""
    places = Depth.of(comparisons).places
    points: list[Point] = []
    for curve, kinds in _CURVES.items():
        worst: dict[int, Comparison] = {}
        for place, comparison in zip(places, comparisons, strict=True):
            if comparison.id.kind in kinds and comparison.tolerance is not None:
                known = worst.get(place)
                if known is None or comparison.excess > known.excess:
                    worst[place] = comparison
        for place, comparison in sorted(worst.items(), key=lambda item: item[0]):
            assert comparison.tolerance is not None
            points.append(Point(curve, place, comparison.id.name, comparison.error, comparison.tolerance.value))
    return points


def write_tensorboard(folder: Path, judgement: Judgement, text: str, page: Path) -> None:
    """Write what the terminal showed, the exit code, and the error and tolerance at each depth.

    The page is not a file that TensorBoard shows, so its path is in the text.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TTraceError(f"--tensorboard needs it: pip install 'torch-ttrace[tensorboard]' ({error}).") from error
    with SummaryWriter(str(folder)) as writer:
        lines = "\n".join(f"    {line}" for line in text.splitlines())  # as code, in Markdown
        writer.add_text("ttrace/verdict", f"{lines}\n\nThe report: {page}")
        writer.add_scalar("ttrace/exit", int(judgement.exit))
        for point in list_points(judgement.comparisons):
            for what, value in (("error", point.error), ("tolerance", point.tolerance)):
                writer.add_scalar(f"{point.curve}/{what}", value, point.depth)


def log_wandb(project: str, folder: Path, judgement: Judgement, text: str, page: Path) -> str:
    """Log a run of a project; return where it is. The variables of wandb, such as WANDB_MODE=offline, are obeyed."""
    try:
        import wandb
    except ImportError as error:
        raise TTraceError(f"--wandb needs it: pip install 'torch-ttrace[wandb]' ({error}).") from error
    with wandb.init(project=project, name=folder.name, dir=str(folder), job_type="ttrace", reinit="create_new") as run:
        run.summary["exit"] = int(judgement.exit)
        run.summary["verdict"] = text.splitlines()[0]
        for point in list_points(judgement.comparisons):
            depth = f"{point.curve}/depth"
            run.define_metric(f"{point.curve}/*", step_metric=depth)
            run.log(
                {depth: point.depth, f"{point.curve}/error": point.error, f"{point.curve}/tolerance": point.tolerance}
            )
        findings = [
            [each.module, str(each.comparison.id), each.cause.name.value, each.cause.sentence]
            for each in judgement.findings
        ]
        columns: list[str | int] = ["module", "tensor", "cause", "sentence"]
        run.log(
            {"findings": wandb.Table(columns=columns, data=findings), "report": wandb.Html(str(page), inject=False)}
        )
        return run.url or str(Path(run.dir).parent)
