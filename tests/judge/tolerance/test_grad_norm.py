"""The gradients' norm: an origin only where every gradient is right, and only as exact as a long sum can be."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor
from ttrace.judge.engine import Threads
from ttrace.judge.tolerance import model
from ttrace.judge.tolerance.grad_norm import measure_norm_error
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.verdict import CauseName


def judged_modules(tmp_path: Path, *, wrong_gradient: bool) -> list[str]:
    case = Case(tmp_path, "tp=2")
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b/tp")
    case.add("0/-/fc.weight/param", draw_tensor(4, 8, seed=1), "a b/tp")
    change = (lambda x: x + draw_tensor(4, 8, seed=9)) if wrong_gradient else None
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 8, seed=2), "a b/tp", change)
    case.add("0/-/./grad_norm", torch.tensor(3.0), "", lambda x: x * 1.5)
    case.add("0/-/./clip", torch.tensor(0.5), "", lambda x: x / 1.5)
    case.add("0/-/fc.weight/param_after", draw_tensor(4, 8, seed=3), "a b/tp", lambda x: x * 1.1)
    return [str(finding.comparison.id.site) for finding in case.judge().findings]


def test_a_wrong_norm_over_right_gradients_is_the_finding(tmp_path: Path) -> None:
    assert judged_modules(tmp_path, wrong_gradient=False) == ["./grad_norm"]


def test_a_wrong_gradient_is_the_finding_and_not_the_norm_made_from_it(tmp_path: Path) -> None:
    assert judged_modules(tmp_path, wrong_gradient=True) == ["fc.weight/param_grad"]


def test_a_norm_of_each_ranks_own_gradients_names_the_axis(tmp_path: Path) -> None:
    case = Case(tmp_path, "pp=2")
    case.add("0/0/fc/output", draw_tensor(4, 8))
    case.add_trusted("0/-/./grad_norm", torch.tensor(5.0))
    for rank, share in enumerate((3.0, 4.0)):
        case.candidate.record(rank, "0/-/./grad_norm", torch.tensor(share), "")
    cause = case.judge().findings[0].cause
    assert (cause.name, cause.axis) == (CauseName.GRADIENT_NORM, "pp")
    assert cause.sentence.endswith("each rank has the norm of its own: not combined over pp")


def test_norms_that_differ_otherwise_name_no_axis(tmp_path: Path) -> None:
    case = Case(tmp_path, "pp=2")
    case.add("0/0/fc/output", draw_tensor(4, 8))
    case.add_trusted("0/-/./grad_norm", torch.tensor(5.0))
    for rank, share in enumerate((3.0, 3.5)):
        case.candidate.record(rank, "0/-/./grad_norm", torch.tensor(share), "")
    assert case.judge().findings[0].cause.axis is None


def test_norms_of_many_numbers_are_off() -> None:
    """By more than u, however the parts are summed, and a sum in parts is off by less: the tolerance knows."""
    gradient = draw_tensor(1 << 22)
    exact = float(gradient.double().norm())
    whole, halves = gradient.norm(), torch.stack([half.norm() for half in gradient.chunk(2)]).norm()
    error = measure_norm_error(float(whole), exact**2, gradient.numel())
    assert abs(float(whole) - exact) / exact <= error
    assert abs(float(whole - halves)) / exact <= error
    assert error < 1e-3


@pytest.mark.parametrize("share", [0.5, 0.99, 1.01, 2.0])
def test_another_norm_is_no_rounding(share: float) -> None:
    """Clipping may leave parameters out, or take the largest element."""
    numel = 10**6
    assert measure_norm_error(share * 3.0, 9.0, numel) == measure_norm_error(3.0, 9.0, numel) < 1e-6


def test_what_cannot_be_measured_is_no_rounding() -> None:
    numel = 10**6
    for norm, squares in ((float("inf"), 9.0), (3.0, float("nan")), (3.0, 0.0)):
        assert measure_norm_error(norm, squares, numel) == measure_norm_error(3.0, 9.0, numel)


def clipped(tmp_path: Path, off: float) -> dict[str, str]:
    """The verdicts on a candidate whose norm is right, where the reference's is off by 1e-5."""
    case = Case(tmp_path, "tp=2")
    gradient, moved = draw_tensor(512, 4096, seed=2), draw_tensor(512, 4096, seed=3)
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b/tp")
    case.add("0/-/fc.weight/param_grad", gradient, "a b/tp")
    norm = float(gradient.double().norm()) * (1 + 1e-5)
    case.add("0/-/./grad_norm", torch.tensor(norm), "", lambda x: x * (1 + off), noise=0.0)
    case.add("0/-/./clip", torch.tensor(1 / norm), "", lambda x: x / (1 + off), noise=0.0)
    case.add("0/-/fc.weight/optim.exp_avg_sq", moved.square(), "a b/tp", lambda x: x / (1 + off) ** 2, noise=1e-7)
    case.add("0/-/fc.weight/optim.main_param", moved, "a b/tp", lambda x: x * (1 + off), noise=1e-7)
    return {str(comparison.id): str(comparison.verdict) for comparison in case.judge().comparisons}


def test_clipping_by_a_norm_that_is_off_is_rounding(tmp_path: Path) -> None:
    verdicts = clipped(tmp_path, -1e-5)
    assert verdicts.pop("0/-/fc.weight/optim.main_param") == "FAIL"  # a parameter is not clipped
    assert set(verdicts.values()) == {"PASS"}


def test_clipping_by_another_norm_is_not(tmp_path: Path) -> None:
    verdicts = clipped(tmp_path, 1e-4)
    assert {verdicts[f"0/-/{name}"] for name in ("./grad_norm", "./clip", "fc.weight/optim.exp_avg_sq")} == {"FAIL"}


def test_no_worker_reads_the_stats_that_are_still_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict that grows while another thread iterates over it ended a run with exit 2."""
    callers: list[threading.Thread] = []

    def measure_here(norm: float, squares: float, numel: int) -> float:
        callers.append(threading.current_thread())
        return measure_norm_error(norm, squares, numel)

    monkeypatch.setattr(model, "measure_norm_error", measure_here)
    case = Case(tmp_path)
    case.add_trusted("0/-/fc.weight/param_grad", draw_tensor(4, 8))
    case.add_trusted("0/-/./grad_norm", torch.tensor(3.0))
    case.add_trusted("0/0/fc/output", draw_tensor(64, 64))  # the others are worth a thread
    ToleranceModel.measure(case.reference.close(), [case.twin.close()], engine=Threads(2))
    assert callers == [threading.main_thread()]
