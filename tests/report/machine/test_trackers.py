"""TensorBoard and Weights & Biases get the verdict and the curves, and the latter also the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ttrace.errors import TTraceError
from ttrace.judge.verdict import Cause, CauseName, Comparison, Finding, Judgement, Tolerance, Verdict
from ttrace.layouts.ids import Kind, TensorId
from ttrace.report.machine.trackers import list_points, log_wandb, write_tensorboard
from ttrace.values.stats import Stats

TEXT = "✗ layers.1 is wrong\n  cause  a factor"


def compare(name: str, kind: Kind, error: float, microbatch: int = 0) -> Comparison:
    return Comparison(
        TensorId.of(0, microbatch, name, kind),
        Verdict.FAIL if error > 1e-6 else Verdict.PASS,
        stats=Stats(count=1, aa=1.0, bb=1.0, dd=error**2, ab=1.0),
        tolerance=Tolerance(1e-6, 1e-7, 1.0),
    )


def make_judgement() -> Judgement:
    comparisons = (
        compare("layers.0", Kind.OUTPUT, 1e-8),
        compare("layers.1", Kind.OUTPUT, 1e-7),
        compare("layers.1", Kind.OUTPUT, 1e-3, microbatch=1),
        compare("layers.1", Kind.GRAD_OUTPUT, 1e-8),
        Comparison(TensorId.of(0, 0, "layers.0", Kind.GRAD_OUTPUT), Verdict.UNJUDGED),
    )
    finding = Finding(comparisons[2], "layers.1", "", Cause(CauseName.UNEXPLAINED, "words"), 0)
    return Judgement(comparisons, (finding,), ())


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text("<html><body>the report</body></html>")
    return path


def test_a_point_is_the_worst_tensor_of_its_place() -> None:
    points = list_points(make_judgement().comparisons)
    assert [(point.curve, point.depth, point.name) for point in points] == [
        ("forward", 0, "layers.0"),
        ("forward", 1, "layers.1"),
        ("backward", 1, "layers.1"),
    ]
    assert [point.error for point in points] == pytest.approx([1e-8, 1e-3, 1e-8])


def test_tensorboard_reads_the_curves_and_the_verdict(tmp_path: Path, page: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_tensorboard(tmp_path / "events", make_judgement(), TEXT, page)
    read = EventAccumulator(str(tmp_path / "events"))
    read.Reload()
    curve = [(event.step, event.value) for event in read.Scalars("forward/error")]
    assert curve == [(0, pytest.approx(1e-8)), (1, pytest.approx(1e-3))]
    assert [event.value for event in read.Scalars("ttrace/exit")] == [1.0]
    said = read.Tensors("ttrace/verdict/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "layers.1 is wrong" in said
    assert str(page) in said


@pytest.mark.slow  # wandb starts a process of its own
def test_wandb_gets_the_curves_the_findings_and_the_page(
    tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = Path(log_wandb("project", tmp_path, make_judgement(), TEXT, page))
    wandb.teardown()  # as the end of a command does it: until then wandb's own process may still have to write
    assert folder.is_relative_to(tmp_path)
    assert [path.read_text() for path in folder.glob("files/media/html/*.html")] == [page.read_text()]
    (table,) = (json.loads(path.read_text()) for path in folder.glob("files/media/table/*.json"))
    assert table["data"] == [["layers.1", "0/1/layers.1/output", "unexplained", "words"]]
    (logged,) = (path.read_bytes() for path in folder.glob("run-*.wandb"))
    assert b"forward/error" in logged
    assert b"layers.1 is wrong" in logged


@pytest.mark.parametrize(("package", "write"), [("tensorboard", write_tensorboard), ("wandb", log_wandb)])
def test_a_missing_extra_says_how_to_install_it(
    package: str, write: Callable[..., Any], tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    arguments = (tmp_path, make_judgement(), TEXT, page)
    with pytest.raises(TTraceError, match=f"--{package} needs it: pip install 'torch-ttrace\\[{package}\\]'"):
        write(*(("project",) if write is log_wandb else ()), *arguments)
