"""What rounding can explain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor, find_comparison, nudge
from ttrace.judge.margin import MARGIN
from ttrace.judge.reason import Reason
from ttrace.judge.tolerance.twins import TINY, TwinSample, estimate_tolerances, is_zero, replica_tolerance, unit
from ttrace.judge.verdict import Exit, Tolerance, Verdict
from ttrace.layouts.ids import TensorId

F32, BF16 = unit(torch.float32), unit(torch.bfloat16)


def sample(name: str, *errors: float, numel: int = 100, dtype: torch.dtype = torch.float32) -> TwinSample:
    return TwinSample(TensorId.parse(name), numel, dtype, errors)


def tolerance_of(samples: list[TwinSample], **settings: float) -> list[Tolerance]:
    """The estimates without their terms, which test_model.py is about."""
    return [replace(tolerance, terms=()) for tolerance in estimate_tolerances(samples, **settings).values()]


def test_a_unit_is_half_an_epsilon() -> None:
    assert BF16 == 2**-8
    assert F32 == 2**-24


def test_tolerance_is_the_margin_times_the_largest_error_of_the_twins() -> None:
    assert tolerance_of([sample("0/0/a/output", 1e-4, 3e-4, 2e-4)]) == [Tolerance(MARGIN * 3e-4, 3e-4, F32)]
    assert tolerance_of([sample("0/0/a/output", 1e-4)], margin=10)[0].value == pytest.approx(1e-3)


def test_tolerance_is_never_below_the_margin_times_the_floor() -> None:
    assert tolerance_of([sample("0/0/a/output", 1e-12)]) == [Tolerance(MARGIN * F32, 1e-12, F32)]
    assert tolerance_of([sample("0/0/a/output")]) == [Tolerance(MARGIN * F32, 0.0, F32)]


def test_the_floor_is_the_unit_of_the_weakest_dtype_so_far() -> None:
    found = tolerance_of(
        [
            sample("0/0/a/output"),
            sample("0/0/b/output", dtype=torch.bfloat16),
            sample("0/0/c/output"),
            sample("0/0/d/output", dtype=torch.float64),
        ]
    )
    assert [tolerance.floor for tolerance in found] == [F32, BF16, BF16, BF16]


def test_tiny_tensors_share_the_largest_error_of_their_kind() -> None:
    found = tolerance_of(
        [
            sample("0/0/./loss", 1e-5, numel=1),
            sample("0/1/./loss", 5e-4, numel=1),
            sample("0/2/./loss", 0.0, numel=1),
            sample("0/0/a/output", 7e-3, numel=TINY - 1),
            sample("0/0/b/output", 1e-5, numel=TINY),
        ]
    )
    assert [tolerance.twin_error for tolerance in found] == [5e-4, 5e-4, 5e-4, 7e-3, 1e-5]


def test_mathematically_zero_tensors_are_left_out_of_the_pool() -> None:
    found = tolerance_of([sample("0/0/a/output", 1.1, numel=4), sample("0/0/b/output", 1e-5, numel=4)])
    assert [tolerance.twin_error for tolerance in found] == [1.1, 1e-5]


def test_integers_and_truth_values_are_exact() -> None:
    for dtype in (torch.int64, torch.int32, torch.bool):
        assert tolerance_of([sample("0/0/a/output", 0.5, dtype=dtype)]) == [Tolerance(0.0, 0.0, 0.0)]


def test_integers_do_not_move_the_floor() -> None:
    found = tolerance_of([sample("0/0/a/output", dtype=torch.int8), sample("0/0/b/output")])
    assert found[1].floor == F32


def test_only_twins_that_are_as_far_off_as_the_tensor_is_large_make_a_zero() -> None:
    assert is_zero((0.01, 1.2))
    assert not is_zero((0.01, 0.02))
    assert not is_zero(())


def test_replicas_may_differ_within_tolerance_but_not_after_a_step() -> None:
    tolerance = Tolerance(1e-3, 1e-4, F32)
    assert replica_tolerance(TensorId.parse("0/0/a/output"), tolerance, torch.float32) == 1e-3
    assert replica_tolerance(TensorId.parse("0/-/a.weight/param_after"), tolerance, torch.float32) == 0.0


def test_an_error_within_the_margin_passes_and_one_beyond_it_fails(tmp_path: Path) -> None:
    full = draw_tensor(64, 64)
    case = Case(tmp_path, noise=1e-3)
    case.add("0/0/a/output", full, "a b/tp", lambda x: nudge(x, 0.003, seed=1))
    case.add("0/0/b/output", full, "a b/tp", lambda x: nudge(x, 0.005, seed=2))
    judgement = case.judge()
    assert [comparison.verdict for comparison in judgement.comparisons] == [Verdict.PASS, Verdict.FAIL]
    beyond = judgement.comparisons[1]
    assert beyond.tolerance is not None
    assert beyond.error / beyond.tolerance.value == pytest.approx(1.25, rel=0.1)
    assert case.judge(margin=16).exit is Exit.PASSED


def test_one_wrong_integer_fails(tmp_path: Path) -> None:
    ids = torch.arange(4096)
    case = Case(tmp_path)
    case.add("0/0/a/output", ids, "a/tp")
    case.add("0/0/b/output", ids, "a/tp", lambda x: x.index_fill(0, torch.tensor([4000]), 4001))
    assert [comparison.verdict for comparison in case.judge().comparisons] == [Verdict.PASS, Verdict.FAIL]


def test_a_candidate_of_a_weaker_dtype_fails(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add("0/0/a/output", draw_tensor(64, 64), "a b/tp", lambda x: x.to(torch.bfloat16))
    assert case.judge().exit is Exit.FOUND


def test_a_gradient_without_siblings_or_terms_is_not_proven_zero(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    case.add("0/-/key.bias/param_grad", 1e-9 * draw_tensor(64), "a/tp", lambda x: -x, noise=1.0)
    judgement = case.judge()
    assert find_comparison(judgement, "0/-/key.bias/param_grad").reason is Reason.UNPROVEN_ZERO
    assert judgement.exit is Exit.UNJUDGED


def test_a_gradient_that_is_large_beside_rounding_of_its_terms_is_not_proven_zero(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output", "0/0/key/grad_output")
    case.add("0/-/key.bias/param_grad", 1e-3 * draw_tensor(64), "a/tp", lambda x: -x, noise=1.0)
    assert find_comparison(case.judge(), "0/-/key.bias/param_grad").reason is Reason.UNPROVEN_ZERO


def test_a_gradient_as_small_as_rounding_of_its_terms_is_not_judged_and_excused(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output", "0/0/key/grad_output")
    case.add("0/-/key.bias/param_grad", 1e-9 * draw_tensor(64), "a/tp", lambda x: -x, noise=1.0)
    judgement = case.judge()
    comparison = find_comparison(judgement, "0/-/key.bias/param_grad")
    assert (comparison.verdict, comparison.reason) == (Verdict.UNJUDGED, Reason.ZERO)
    assert judgement.exit is Exit.PASSED


def test_a_gradient_that_is_exactly_zero_in_the_reference_alone_is_excused_too(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output", "0/0/key/grad_output", "0/-/key.weight/param_grad")
    case.reference.record_parts("0/-/key.bias/param_grad", torch.zeros(64))
    case.twin.record_parts("0/-/key.bias/param_grad", 1e-9 * draw_tensor(64))
    case.candidate.record_parts("0/-/key.bias/param_grad", 1e-9 * draw_tensor(64), "a/tp")
    assert case.judge().exit is Exit.PASSED


def test_activations_that_twins_cannot_repeat_are_an_unstable_reference_and_no_success(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    case.add("0/0/b/output", draw_tensor(64), "a/tp", lambda x: -x, noise=1.0)
    judgement = case.judge()
    assert find_comparison(judgement, "0/0/b/output").reason is Reason.UNSTABLE
    assert judgement.exit is Exit.UNJUDGED


def test_nothing_but_excuses_is_no_success(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add("0/-/key.bias/param_grad", draw_tensor(64), "a/tp", noise=1.0)
    judgement = case.judge()
    assert judgement.count(Verdict.UNJUDGED) == len(judgement.comparisons) == 1
    assert judgement.exit is Exit.UNJUDGED


def test_what_passes_as_a_gradient_passes_as_its_square(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=1", noise=1e-3)
    gradient = draw_tensor(16)
    case.add("0/-/norm.weight/param_grad", gradient, "a", lambda x: 1.003 * x)
    case.add("0/-/norm.weight/optim.exp_avg_sq", gradient.square(), "a", lambda x: 1.003**2 * x, noise=1e-6)
    case.add("0/-/norm.weight/optim.step", torch.ones(1), "a", lambda x: 1.003 * x, noise=0.0)
    judgement = case.judge()
    verdicts = {c.id.site.slot or c.id.kind.value: c.verdict for c in judgement.comparisons}
    assert verdicts == {"param_grad": Verdict.PASS, "exp_avg_sq": Verdict.PASS, "step": Verdict.FAIL}
