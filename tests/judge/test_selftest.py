"""What a check would have revealed, and what it protects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor
from ttrace.judge.check import judge_candidate
from ttrace.judge.selftest import LOST_SHARD, Power, SelfTest, run_selftest
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.verdict import Exit, Judgement, Weakness

ID = "0/0/fc/output"
WEIGHT = "0/-/fc.weight"
FULL = draw_tensor(8, 12)


def selftest_of(case: Case) -> SelfTest:
    rounding = ToleranceModel.measure(case.reference.close(), [case.twin.close()])
    candidate = case.candidate.close()
    return run_selftest(rounding, candidate, judge_candidate(rounding, candidate))


def power(case: Case, name: str = ID) -> Power:
    return next(power for power in selftest_of(case).powers if str(power.comparison.id) == name)


def test_every_fault_in_a_precise_tensor_is_seen(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add(ID, FULL, "a b/tp")
    case.add("0/1/fc/output", draw_tensor(8, 12, seed=1), "a b/tp")
    found = power(case)
    assert found.seen == {
        "scaled by 1.01": True,
        "scaled by 1.001": True,
        LOST_SHARD: True,
        "chunks swapped": True,
        "a row zeroed": True,
        "another microbatch": True,
    }
    assert found.protects


@pytest.mark.parametrize(("noise", "seen"), [(1e-5, (True, True)), (1e-3, (True, False)), (1e-2, (False, False))])
def test_small_factors_are_seen_down_to_the_tolerance(tmp_path: Path, noise: float, seen: tuple[bool, bool]) -> None:
    case = Case(tmp_path, noise=noise)
    case.add(ID, FULL, "a b/tp")
    found = power(case)
    assert (found.seen["scaled by 1.01"], found.seen["scaled by 1.001"]) == seen
    assert found.error is not None
    assert 2 * noise < found.error < 8 * noise
    assert found.scale is not None
    assert 1 < found.scale <= 1 + found.error


def test_a_tolerance_that_a_lost_shard_passes_protects_nothing(tmp_path: Path) -> None:
    name = "0/-/fc.weight/optim.exp_avg"  # an activation's scale would show it all the same
    case = Case(tmp_path, noise=0.28)
    case.add(name, FULL, "a b/tp")
    found = power(case, name)
    assert not found.seen[LOST_SHARD]
    assert not found.protects
    assert "so wide that a lost shard passes" in found.reason


def test_what_is_not_judged_protects_nothing_and_says_why(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right(ID)
    case.add_trusted("0/0/gone/output", FULL)
    found = power(case, "0/0/gone/output")
    assert (found.protects, found.error, found.seen) == (False, None, {})
    assert found.reason == "the candidate has no such tensor"


def test_faults_that_change_nothing_are_no_faults(tmp_path: Path) -> None:
    """A mask of ones has no chunks to swap, and no neighbour has other values."""
    case = Case(tmp_path)
    case.add(ID, torch.ones(8, 12), "a b/tp")
    case.add("0/1/fc/output", torch.ones(8, 12), "a b/tp")
    assert set(power(case).seen) == {"scaled by 1.01", "scaled by 1.001", LOST_SHARD, "a row zeroed"}


@pytest.mark.parametrize("layout", ["a b", "a/tp b", "a b +tp", "a/tp b/dp"])
def test_a_lost_part_is_seen_under_every_layout(tmp_path: Path, layout: str) -> None:
    case = Case(tmp_path, "dp=2 tp=2")
    case.add(ID, FULL, layout)
    found = power(case)
    assert found.seen[LOST_SHARD]
    assert found.seen["chunks swapped"]


def test_the_traces_stay_as_they_were(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add(ID, FULL, "a b/tp")
    rounding, candidate = ToleranceModel.measure(case.reference.close(), [case.twin.close()]), case.candidate.close()
    run_selftest(rounding, candidate, judge_candidate(rounding, candidate))
    assert judge_candidate(rounding, candidate).exit is Exit.PASSED


def trained(tmp_path: Path, gradient: torch.Tensor, update: torch.Tensor, *, noise: float = 1e-6) -> Case:
    case = Case(tmp_path, parameters={"fc.weight": True})
    case.add(ID, FULL, "a b/tp")
    case.add(f"{WEIGHT}/param", FULL, "a b/tp", noise=0.0)
    case.add(f"{WEIGHT}/param_grad", gradient, "a b/tp", noise=noise)
    case.add(f"{WEIGHT}/param_after", FULL + update, "a b/tp", noise=0.0)
    return case


def weak(judgement: Judgement) -> dict[str, Weakness]:
    assert judgement.reach is not None
    return dict(judgement.reach.weak)


def test_a_parameter_that_is_updated_is_protected(tmp_path: Path) -> None:
    case = trained(tmp_path, draw_tensor(8, 12, seed=1), 1e-2 * draw_tensor(8, 12, seed=2))
    found = selftest_of(case)
    assert (dict(found.unprotected), found.exit) == ({}, Exit.PASSED)
    again = trained(tmp_path / "again", draw_tensor(8, 12, seed=1), 1e-2 * draw_tensor(8, 12, seed=2))
    assert weak(again.judge()) == {}


def test_without_an_update_nothing_tests_the_optimizer(tmp_path: Path) -> None:
    """A learning rate of 0, as in the first step of a warm-up."""
    found = selftest_of(trained(tmp_path, draw_tensor(8, 12, seed=1), torch.zeros(8, 12)))
    assert dict(found.unprotected) == {"fc.weight": Weakness.NO_UPDATE}
    assert found.exit is Exit.UNJUDGED
    again = trained(tmp_path / "again", draw_tensor(8, 12, seed=1), torch.zeros(8, 12))
    assert weak(again.judge()) == {"fc.weight": Weakness.NO_UPDATE}


def test_a_parameter_whose_gradient_is_rounding_has_no_power(tmp_path: Path) -> None:
    case = trained(tmp_path, draw_tensor(8, 12, seed=1), torch.zeros(8, 12), noise=1.0)
    assert weak(case.judge()) == {"fc.weight": Weakness.NO_GRADIENT}


def test_weight_decay_alone_does_not_test_a_parameter(tmp_path: Path) -> None:
    """A gradient of zeros: the update is judged, but no wrong gradient enters it."""
    found = selftest_of(trained(tmp_path, torch.zeros(8, 12), -1e-2 * FULL))
    assert dict(found.unprotected) == {"fc.weight": Weakness.NO_GRADIENT}
    assert weak(trained(tmp_path / "again", torch.zeros(8, 12), -1e-2 * FULL).judge()) == {
        "fc.weight": Weakness.NO_GRADIENT
    }


def test_a_frozen_parameter_needs_no_power(tmp_path: Path) -> None:
    case = Case(tmp_path, parameters={"fc.weight": False})
    case.add(ID, FULL, "a b/tp")
    case.add(f"{WEIGHT}/param", FULL, "a b/tp")
    assert weak(case.judge()) == {}
