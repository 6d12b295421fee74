"""A BatchNorm that sees only its rank's rows of a divided batch is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor
from ttrace.judge.verdict import Judgement


def normalise(x: torch.Tensor) -> torch.Tensor:
    dims = [dim for dim in range(x.ndim) if dim != 1]
    return (x - x.mean(dims, keepdim=True)) / x.std(dims, correction=0, keepdim=True) * 0.5 + 0.1


def judge(folder: Path, x: torch.Tensor, parts: list[torch.Tensor]) -> Judgement:
    case = Case(folder, "dp=2", batch_axes=("dp",))
    case.add("0/0/norm/input", x, "a/dp ...")
    case.add_trusted("0/0/norm/output", normalise(x))
    for rank, part in enumerate(parts):
        case.candidate.record(rank, "0/0/norm/output", part)
    return case.judge()


@pytest.mark.parametrize("shape", [(8, 4), (8, 4, 5, 5)])
def test_statistics_of_own_rows_are_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    x = draw_tensor(*shape)
    (finding,) = judge(tmp_path, x, [normalise(part) for part in x.chunk(2)]).findings
    assert finding.module == "norm"
    assert finding.cause.sentence == "statistics of this rank's rows only: they are not combined over dp"
    assert finding.cause.axis == "dp"


def test_another_error_of_the_same_module_is_not(tmp_path: Path) -> None:
    x = draw_tensor(8, 4)
    (finding,) = judge(tmp_path, x, [part + 0.3 for part in normalise(x).chunk(2)]).findings
    assert "statistics" not in finding.cause.sentence


def test_synchronised_statistics_pass(tmp_path: Path) -> None:
    x = draw_tensor(8, 4)
    assert judge(tmp_path, x, list(normalise(x).chunk(2))).findings == ()
