"""Scripts that keep their data: what sums over all samples is judged if both sides had the same ones in total."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor, find_comparison
from ttrace.judge.reason import Reason
from ttrace.judge.verdict import Exit, Verdict

ROWS = ("a", "b", "c", "d")


def make_case(folder: Path, reference: tuple[str, ...], *candidate: tuple[str, ...]) -> Case:
    """Make a case in which two ranks have other rows in their microbatches, and so other outputs."""
    case = Case(folder, "dp=2")
    case.reference.samples[0] = {"0/x": reference}
    for rank, rows in enumerate(candidate):
        case.candidate.samples[rank] = {"0/x": rows}
    for number in range(2):
        case.add(f"0/{number}/./batch.x", torch.arange(8).view(2, 4), change=lambda x: x + 1)
        case.add(f"0/{number}/fc/output", draw_tensor(2, 4), change=lambda x: x + draw_tensor(2, 4, seed=7))
    case.add("0/-/fc.mean/buffer_after", draw_tensor(4), change=lambda x: x + 1)
    case.add("0/-/fc.weight/param", draw_tensor(4, 4), "a/dp b")
    return case


@pytest.mark.parametrize("is_wrong", [False, True])
def test_sums_over_the_same_samples_are_judged(is_wrong: bool, tmp_path: Path) -> None:
    case = make_case(tmp_path, ROWS, ("a", "c"), ("d", "b"))
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 4), change=(lambda x: 2 * x) if is_wrong else None)
    judgement = case.judge()
    assert judgement.exit is (Exit.FOUND if is_wrong else Exit.PASSED)
    assert judgement.problems == ()
    assert [str(finding.comparison.id) for finding in judgement.findings] == ["0/-/fc.weight/param_grad"] * is_wrong
    assert find_comparison(judgement, "0/0/fc/output").reason is Reason.MOVED_SAMPLES
    assert find_comparison(judgement, "0/-/fc.mean/buffer_after").reason is Reason.MOVED_SAMPLES
    assert any("on the same 4 rows, but not each rank and microbatch" in note for note in judgement.notes)


def test_a_sample_may_be_on_several_ranks(tmp_path: Path) -> None:
    case = make_case(tmp_path, ROWS, ROWS[::-1], ROWS)
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 4))
    assert case.judge().exit is Exit.PASSED


@pytest.mark.parametrize(
    ("ranks", "num_common", "num_others"),
    [
        ([("a", "b"), ("a", "b")], 2, 2),  # no sampler: every rank loads the same half
        ([("a", "b"), ("c", "e")], 3, 1),
        ([("a", "b", "c"), ("a", "b", "c")], 3, 3),
        ([("a", "b", "c"), ("d", "e", "f")], 4, 2),
        ([("a", "b"), ("c",)], 3, 0),
    ],
)
def test_other_samples_are_not_judged(
    ranks: list[tuple[str, ...]], num_common: int, num_others: int, tmp_path: Path
) -> None:
    case = make_case(tmp_path, ROWS, *ranks)
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 4), change=lambda x: 2 * x)
    judgement = case.judge()
    assert judgement.exit is Exit.UNJUDGED
    assert judgement.findings == ()
    assert find_comparison(judgement, "0/-/fc.weight/param_grad").verdict is Verdict.UNJUDGED
    words = f"of the reference's 4 rows, the candidate had {num_common}, and {num_others} others."
    assert any(words in problem for problem in judgement.problems), judgement.problems
