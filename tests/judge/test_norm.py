"""A wrong gradient norm is an origin only where every gradient is right."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.traces import Case, drawn


def judged_modules(tmp_path: Path, *, wrong_gradient: bool) -> list[str]:
    case = Case(tmp_path, "tp=2")
    case.both("0/0/fc/output", drawn(4, 8), "a b/tp")
    case.both("0/-/fc.weight/param", drawn(4, 8, seed=1), "a b/tp")
    change = (lambda x: x + drawn(4, 8, seed=9)) if wrong_gradient else None
    case.both("0/-/fc.weight/param_grad", drawn(4, 8, seed=2), "a b/tp", change)
    case.both("0/-/./grad_norm", torch.tensor(3.0), "", lambda x: x * 1.5)
    case.both("0/-/./clip", torch.tensor(0.5), "", lambda x: x / 1.5)
    case.both("0/-/fc.weight/param_after", drawn(4, 8, seed=3), "a b/tp", lambda x: x * 1.1)
    return [str(finding.comparison.id.site) for finding in case.judged().findings]


def test_a_wrong_norm_over_right_gradients_is_the_finding(tmp_path: Path) -> None:
    assert judged_modules(tmp_path, wrong_gradient=False) == ["./grad_norm"]


def test_a_wrong_gradient_is_the_finding_and_not_the_norm_made_from_it(tmp_path: Path) -> None:
    assert judged_modules(tmp_path, wrong_gradient=True) == ["fc.weight/param_grad"]


def test_a_norm_of_each_ranks_own_gradients_names_the_axis(tmp_path: Path) -> None:
    case = Case(tmp_path, "pp=2")
    case.both("0/0/fc/output", drawn(4, 8))
    case.trusted("0/-/./grad_norm", torch.tensor(5.0))
    for rank, share in enumerate((3.0, 4.0)):
        case.candidate.record(rank, "0/-/./grad_norm", torch.tensor(share), "")
    cause = case.judged().findings[0].cause
    assert (cause.name, cause.axis) == ("gradient norm", "pp")
    assert cause.sentence.endswith("each rank has the norm of its own: not combined over pp")


def test_norms_that_differ_otherwise_name_no_axis(tmp_path: Path) -> None:
    case = Case(tmp_path, "pp=2")
    case.both("0/0/fc/output", drawn(4, 8))
    case.trusted("0/-/./grad_norm", torch.tensor(5.0))
    for rank, share in enumerate((3.0, 3.5)):
        case.candidate.record(rank, "0/-/./grad_norm", torch.tensor(share), "")
    assert case.judged().findings[0].cause.axis is None
