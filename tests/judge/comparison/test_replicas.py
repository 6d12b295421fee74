"""Replicas of final gradients: equal bit for bit where a framework reduced them, else to their own dtype's rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, TraceBuilder, draw_tensor, find_comparison, nudge
from ttrace.judge.check import check, judge_candidate
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.tolerance.run_to_run import Noise
from ttrace.judge.tolerance.twins import replica_tolerance, unit
from ttrace.judge.verdict import CauseName, Comparison, Exit, Tolerance, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.report.facts import list_facts

GRAD = "0/-/fc.weight/param_grad"
FULL = draw_tensor(16, 16)


def autocast_case(folder: Path, mesh: str = "dp=2", *, reduced: tuple[str, ...] = ()) -> Case:
    """As under autocast: activations in bfloat16, a float32 gradient that twins know to a percent."""
    case = Case(folder, mesh, reduced=reduced)
    half = draw_tensor(8, 8).to(torch.bfloat16)
    case.add_trusted("0/0/fc/output", half, noise=1e-2)
    for rank in range(case.candidate.mesh.num_ranks):
        case.candidate.record(rank, "0/0/fc/output", half, "a b")
    case.add_trusted(GRAD, FULL, noise=1e-2)
    return case


def drifted(case: Case, *sizes: float) -> Comparison:
    """Each rank's gradient is off by a factor of its own."""
    for rank, size in enumerate(sizes):
        case.candidate.record(rank, GRAD, FULL * (1 + size), "a b")
    return find_comparison(case.judge(), GRAD)


@pytest.mark.parametrize("reduced", [(), ("dp",)])
def test_a_drift_of_a_percent_under_autocast_is_a_conflict(tmp_path: Path, reduced: tuple[str, ...]) -> None:
    assert drifted(autocast_case(tmp_path / "right", reduced=reduced), 0.0, 0.0).verdict is Verdict.PASS
    comparison = drifted(autocast_case(tmp_path / "wrong", reduced=reduced), 0.0, 0.01)
    assert comparison.verdict is Verdict.CONFLICT
    assert comparison.tolerance is not None
    assert comparison.replica_error < comparison.tolerance.value  # the reference is not known as well as that


def test_what_a_framework_reduced_is_equal_bit_for_bit(tmp_path: Path) -> None:
    """Rounding of the last bit: right where ranks computed it, wrong where they got it from one sum."""
    last_bit = 2.0**-23
    assert drifted(autocast_case(tmp_path / "computed"), 0.0, last_bit).verdict is Verdict.PASS
    case = autocast_case(tmp_path / "reduced", reduced=("dp",))
    case.candidate.record(0, GRAD, FULL, "a b")
    case.candidate.record(1, GRAD, FULL * (1 + last_bit), "a b")
    judgement = case.judge()
    assert judgement.exit is Exit.FOUND
    [finding] = judgement.findings
    assert (finding.cause.name, finding.cause.axis) == (CauseName.REPLICAS_DIFFER, "dp")
    assert dict(list_facts(finding, ()))["error"].endswith("between replicas, which must be equal, bit for bit")


def test_only_replicas_along_the_reduced_axis_are_copies(tmp_path: Path) -> None:
    """On dp=2 tp=2, ranks 0 and 2 lie along dp, and so do 1 and 3."""
    bit = 2.0**-23
    for number, (sizes, verdict) in enumerate(
        (
            ((0.0, bit, 0.0, bit), Verdict.PASS),
            ((0.0, bit, 0.0, 0.0), Verdict.CONFLICT),
            ((0.0, 0.0, bit, bit), Verdict.CONFLICT),
        )
    ):
        case = autocast_case(tmp_path / str(number), "dp=2 tp=2", reduced=("dp",))
        assert drifted(case, *sizes).verdict is verdict


def test_replicas_in_another_factorisation_are_found(tmp_path: Path) -> None:
    case = autocast_case(tmp_path, "dp=4 | edp=2 ep=2", reduced=("edp",))
    assert drifted(case, 0.0, 0.0, 2.0**-23, 0.0).verdict is Verdict.CONFLICT


def test_replicas_that_are_wrong_alike_are_told_as_wrong(tmp_path: Path) -> None:
    comparison = drifted(autocast_case(tmp_path, reduced=("dp",)), 1.0, 1.0 + 1e-6)
    assert comparison.verdict is Verdict.FAIL


def test_gradients_that_a_second_run_does_not_repeat_are_not_held_to_it(tmp_path: Path) -> None:
    case = autocast_case(tmp_path, reduced=("dp",))
    again = TraceBuilder(tmp_path / "repeat", "dp=2", reduced=("dp",))
    for rank in (0, 1):
        case.candidate.record(rank, GRAD, FULL * (1 + rank * 1e-3), "a b")
        again.record(rank, GRAD, nudge(FULL, 1e-3), "a b")
    reference, twin, candidate = (side.close() for side in (case.reference, case.twin, case.candidate))
    rounding = ToleranceModel.measure(reference, [twin])
    assert find_comparison(check(reference, [twin], candidate), GRAD).verdict is Verdict.CONFLICT
    noisy = Noise.between(candidate, again.close(), rounding).widen(rounding)
    assert find_comparison(judge_candidate(noisy, candidate), GRAD).verdict is Verdict.PASS


def test_only_final_gradients_are_held_to_their_own_dtype() -> None:
    tolerance, weak = Tolerance(1e-2, 2e-3, unit(torch.bfloat16)), 2.0**-16
    final, share = TensorId.parse(GRAD), TensorId.parse("0/0/fc.weight/param_grad")
    assert replica_tolerance(final, tolerance, torch.float32) == pytest.approx(1e-2 * weak)
    assert replica_tolerance(final, tolerance, torch.bfloat16) == 1e-2
    assert replica_tolerance(final, tolerance, torch.float32, is_reduced=True) == 0.0
    assert replica_tolerance(share, tolerance, torch.float32, is_reduced=True) == 1e-2
