"""The verdict and the curves of a run as TensorBoard events."""

from __future__ import annotations

from pathlib import Path

from ttrace.errors import TTraceError
from ttrace.judge.verdict import Judgement
from ttrace.report.machine.trackers import list_points


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
