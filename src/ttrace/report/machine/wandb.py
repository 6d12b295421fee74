"""The verdict, the curves and the page of a run, for Weights & Biases."""

from __future__ import annotations

from pathlib import Path

from ttrace.errors import TTraceError
from ttrace.judge.verdict import Judgement
from ttrace.report.machine.trackers import list_points


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
