"""A candidate that differs from itself: noise is added to the tolerance, more than that excuses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, TraceBuilder, draw_tensor, nudge
from ttrace.judge.check import judge_candidate
from ttrace.judge.margin import MARGIN
from ttrace.judge.reason import Reason, describe
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.tolerance.run_to_run import Noise, is_repeated
from ttrace.judge.verdict import Exit, Judgement

NOISE = 1e-5
"""The twins' error."""


def judge(folder: Path, *, noise: float, wrong: float = 0.0) -> tuple[Judgement, Judgement, list[str]]:
    """A candidate whose two runs have noise, so many times the twins' error: judged without and with it, and told."""
    case = Case(folder, noise=NOISE)
    again = TraceBuilder(folder / "again", "tp=2")
    for i, name in enumerate(("0/0/a/output", "0/0/b/output")):
        full = draw_tensor(64, 64, seed=i)
        case.add_trusted(name, full)
        for seed, trace in ((10 + i, case.candidate), (20 + i, again)):
            trace.record_parts(name, nudge(full, noise * NOISE, seed) + wrong * draw_tensor(64, 64, seed=7), "a b/tp")
    rounding, candidate = ToleranceModel.measure(case.reference.close(), [case.twin.close()]), case.candidate.close()
    found = Noise.between(candidate, again.close(), rounding)
    return (
        judge_candidate(rounding, candidate),
        judge_candidate(found.widen(rounding), candidate),
        found.notes(rounding),
    )


def test_noise_is_added_to_the_tolerance(tmp_path: Path) -> None:
    before, after, notes = judge(tmp_path, noise=8.0)
    assert before.exit is Exit.FOUND
    assert after.exit is Exit.PASSED
    tolerance = after.comparisons[0].tolerance
    assert tolerance is not None
    assert tolerance.value == pytest.approx(MARGIN * NOISE * (1 + 8 * 2**0.5), rel=0.1)
    (note,) = notes
    assert note.startswith("the candidate is not deterministic: 2 of 2 tensors differ between two runs of it, 0/0/a/")


def test_what_is_wrong_in_both_runs_is_found_through_noise(tmp_path: Path) -> None:
    _, after, _ = judge(tmp_path, noise=8.0, wrong=1e-2)
    assert after.exit is Exit.FOUND


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (0.0, Exit.PASSED),
        (3 * NOISE, Exit.PASSED),  # within the tolerance without the noise
        (30 * NOISE, Exit.UNJUDGED),
        (100 * NOISE, Exit.FOUND),
    ],
)
def test_noise_is_no_room_for_what_is_wrong_in_both_runs(wrong: float, expected: Exit, tmp_path: Path) -> None:
    _, after, _ = judge(tmp_path, noise=8.0, wrong=wrong)
    assert after.exit is expected
    if expected is Exit.UNJUDGED:
        assert {comparison.reason for comparison in after.comparisons} == {Reason.BEHIND_NOISE}
        assert "have an error of 3.0e-04 in common, and rounding explains 3.9e-05" in describe(after.comparisons[0].why)


def judge_errors(folder: Path, *errors: torch.Tensor) -> Judgement:
    """A candidate whose two runs have these errors."""
    case, full = Case(folder, noise=NOISE), draw_tensor(*errors[0].shape)
    case.add_trusted("0/0/a/output", full)
    case.candidate.record_parts("0/0/a/output", full + errors[0], "a b/tp")
    again = TraceBuilder(folder / "again", "tp=2")
    again.record_parts("0/0/a/output", full + errors[1], "a b/tp")
    rounding, candidate = ToleranceModel.measure(case.reference.close(), [case.twin.close()]), case.candidate.close()
    return judge_candidate(Noise.between(candidate, again.close(), rounding).widen(rounding), candidate)


def test_one_noisy_number_that_moves_all_elements_is_not_taken_for_a_systematic_error(tmp_path: Path) -> None:
    direction = NOISE * draw_tensor(64, 64, seed=5)
    assert judge_errors(tmp_path / "noise", 16 * direction, 10 * direction).exit is Exit.PASSED
    wrong = NOISE * draw_tensor(64, 64, seed=6)
    found = judge_errors(tmp_path / "wrong", 16 * wrong + 3 * direction, 16 * wrong - 3 * direction)
    assert found.exit is Exit.UNJUDGED


def test_a_few_elements_may_agree_by_chance(tmp_path: Path) -> None:
    wrong, direction = (NOISE * draw_tensor(2, 4, seed=seed) for seed in (6, 5))
    assert judge_errors(tmp_path, 9 * wrong + 3 * direction, 9 * wrong - 3 * direction).exit is Exit.PASSED


def test_a_race_excuses_nothing(tmp_path: Path) -> None:
    _, after, notes = judge(tmp_path, noise=1000.0)
    assert after.exit is Exit.FOUND
    assert notes[1].startswith("two runs of the candidate differ by more than rounding explains, first at 0/0/a/output")


def test_a_candidate_that_repeats_itself_changes_nothing(tmp_path: Path) -> None:
    before, after, notes = judge(tmp_path, noise=0.0, wrong=1e-2)
    assert notes == []
    assert [c.tolerance for c in before.comparisons] == [c.tolerance for c in after.comparisons]


def test_one_bit_is_a_difference(tmp_path: Path) -> None:
    traces = []
    for i in range(3):
        trace = TraceBuilder(tmp_path / str(i), "tp=2")
        trace.record_parts("0/0/a/output", torch.ones(4, 4) + (i == 2) * 2.0**-23, "a b/tp")
        traces.append(trace.close())
    assert is_repeated(traces[0], traces[1])
    assert not is_repeated(traces[0], traces[2])


@pytest.mark.parametrize(("change", "is_rounding"), [(1e-6, True), (1e-2, False)])
def test_a_repeat_as_far_off_as_the_twins_may_be_another_order_of_sums_or_a_changed_state(
    tmp_path: Path, change: float, is_rounding: bool
) -> None:
    case = Case(tmp_path, noise=change)
    full = draw_tensor(64, 64, seed=0)
    case.add_trusted("0/0/a/output", full)
    echo = TraceBuilder(tmp_path / "echo")
    echo.record(0, "0/0/a/output", nudge(full, change, 5))
    reference = case.reference.close()
    rounding = ToleranceModel.measure(reference, [case.twin.close()])
    assert Noise.between(reference, echo.close(), rounding, "reference").is_rounding(rounding) is is_rounding
