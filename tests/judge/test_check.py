"""What a whole check says: its exit code, its problems, its notes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, TraceBuilder, draw_tensor, find_comparison
from ttrace.errors import TraceError
from ttrace.judge.check import check
from ttrace.judge.reason import describe
from ttrace.judge.verdict import Exit, Verdict
from ttrace.layouts.region import Region
from ttrace.trace.reader import Trace


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A candidate that is right so far."""
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    return case


def test_a_clean_candidate_passes(case: Case) -> None:
    judgement = case.judge()
    assert judgement.exit is Exit.PASSED
    assert (judgement.findings, judgement.problems, judgement.notes) == ((), (), ())


def test_a_wrong_tensor_is_a_finding(case: Case) -> None:
    case.add_wrong("0/0/head/output")
    judgement = case.judge()
    assert judgement.exit is Exit.FOUND
    assert [str(f.comparison.id) for f in judgement.findings] == ["0/0/head/output"]


def test_what_could_not_be_judged_is_no_success(case: Case) -> None:
    case.add_trusted("0/0/head/output", draw_tensor(4, 8))
    assert case.judge().exit is Exit.UNJUDGED


def test_findings_outrank_what_could_not_be_judged(case: Case) -> None:
    case.add_wrong("0/0/head/output")
    case.add_trusted("0/0/lost/output", draw_tensor(4, 8))
    judgement = check(case.reference.close(), [case.twin.close()], case.candidate.close(problems=["the disk was full"]))
    assert "the disk was full" in judgement.problems
    assert judgement.exit is Exit.FOUND


def test_choices_within_rounding_of_a_tie_are_counted(case: Case) -> None:
    scores = torch.tensor([[1.0, 1.0 + 1e-7, 0.0], [0.0, 1.0, 2.0]])
    case.add("0/0/router/decision.0.scores", scores)
    case.add("0/0/router/decision.0", torch.tensor([[1], [2]]), change=lambda _: torch.tensor([[0], [2]]))
    judgement = case.judge()
    assert judgement.exit is Exit.PASSED
    assert [note.split(":")[0] for note in judgement.notes] == [
        "1 of 2 choices differ, in 1 tensor, all within rounding of a tie"
    ]


@pytest.mark.parametrize(("size", "expected"), [(0.0, Exit.UNJUDGED), (1.0, Exit.PASSED)])
def test_a_check_without_any_gradient_is_no_success(case: Case, size: float, expected: Exit) -> None:
    case.add("0/-/fc.weight/param_grad", torch.zeros(4, 8))
    case.add("0/-/head.weight/param_grad", size * draw_tensor(4, 8))
    judgement = case.judge()
    assert judgement.exit is expected
    about = [problem for problem in judgement.problems if problem.startswith("no parameter of the reference has a")]
    assert len(about) == (expected is Exit.UNJUDGED)


def test_an_empty_candidate_trace_is_not_judged_and_says_what_to_do(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_trusted("0/0/fc/output", draw_tensor(4, 8))
    judgement = case.judge()
    assert judgement.exit is Exit.UNJUDGED
    assert any("the candidate recorded no module's output" in p and "session.step" in p for p in judgement.problems)


def test_two_empty_traces_are_not_judged(tmp_path: Path) -> None:
    judgement = Case(tmp_path).judge()
    assert judgement.exit is Exit.UNJUDGED
    assert any("the reference recorded no module's output" in problem for problem in judgement.problems)


def test_a_trace_without_any_output_is_not_judged_although_all_it_has_passes(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add("0/-/fc.weight/param", draw_tensor(4, 8), "a b/tp")
    judgement = case.judge()
    assert judgement.count(Verdict.PASS) == 1
    assert judgement.exit is Exit.UNJUDGED
    assert any("ttrace.attach" in problem for problem in judgement.problems)


def test_a_folder_without_a_trace_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="ttrace trace --out"):
        Trace(tmp_path / "nothing")


def test_an_incomplete_trace_is_not_judged(case: Case) -> None:
    judgement = check(case.reference.close(), [case.twin.close()], case.candidate.close(unfinished=[1]))
    assert judgement.exit is Exit.UNJUDGED
    assert any("rank-00001 is incomplete" in problem for problem in judgement.problems)


def test_an_incomplete_twin_is_not_trusted(case: Case) -> None:
    judgement = check(case.reference.close(), [case.twin.close(unfinished=[0])], case.candidate.close())
    assert judgement.exit is Exit.UNJUDGED


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b")
    case.add("0/-/fc.weight/param", draw_tensor(4, 8), "a b/tp")
    judgement = check(case.reference.close(), [case.twin.close()], case.candidate.close(without=[1]))
    assert judgement.exit is Exit.UNJUDGED
    assert any("rank 1 of 2 left no trace" in problem for problem in judgement.problems)


def test_an_axis_that_divides_nothing_is_idle(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2 tp=2")
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b/tp")
    judgement = case.judge()
    assert judgement.exit is Exit.UNJUDGED
    assert any(problem.startswith("axis dp=2 cuts, sums and distributes nothing") for problem in judgement.problems)


@pytest.mark.parametrize("layout", ["a b/tp +dp", "a/dp b/tp", "a b/tp:zigzag/dp"])
def test_an_axis_that_cuts_or_sums_is_not_idle(tmp_path: Path, layout: str) -> None:
    case = Case(tmp_path, "dp=2 tp=2")
    case.add("0/0/fc/output", draw_tensor(4, 8), layout)
    assert case.judge().exit is Exit.PASSED


def test_an_axis_that_distributes_microbatches_or_stages_is_not_idle(tmp_path: Path) -> None:
    case = Case(tmp_path, "pp=2 dp=2")
    for name, ranks in (("0/0/a/output", [0]), ("0/1/a/output", [1]), ("0/0/b/output", [2]), ("0/1/b/output", [3])):
        case.add_trusted(name, draw_tensor(4, 8))
        case.candidate.record_parts(name, draw_tensor(4, 8), ranks=ranks)
    assert case.judge().exit is Exit.PASSED


def test_an_axis_along_which_flat_shards_lie_is_not_idle(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    full = draw_tensor(4, 8)
    case.add_trusted("0/0/fc/output", full)
    for rank in range(2):
        region = Region.flat_of((4, 8), ((16 * rank, 16 * rank + 16),))
        case.candidate.record(rank, "0/0/fc/output", region.take(full), region=region)
    assert case.judge().exit is Exit.PASSED


def test_an_inferred_cut_keeps_an_axis_from_being_idle_and_is_counted(tmp_path: Path) -> None:
    case = Case(tmp_path)
    full = draw_tensor(4, 8)
    case.add_trusted("0/0/fc/output", full)
    for rank in range(2):
        case.candidate.record(rank, "0/0/fc/output", full[:, 4 * rank : 4 * rank + 4])
    judgement = case.judge()
    assert judgement.exit is Exit.PASSED
    assert judgement.notes == ("1 of 1 layouts were inferred from shapes",)


@pytest.mark.parametrize("name", ["0/0/./batch.ids", "0/0/./input"])
def test_other_data_is_not_judged_and_nothing_is_found_in_what_follows_from_it(case: Case, name: str) -> None:
    ids = torch.arange(24).reshape(4, 6)
    case.add(name, ids, change=lambda x: x.flip(0))
    case.add_wrong("0/0/embedding/output")
    judgement = case.judge()
    assert judgement.exit is Exit.UNJUDGED
    assert judgement.findings == ()
    assert any(p.startswith(f"{name}: the candidate was fed other data") for p in judgement.problems)
    assert any("session.batch" in problem for problem in judgement.problems)


def test_data_must_be_the_same_to_the_bit(case: Case) -> None:
    case.add("0/0/./input", draw_tensor(4, 8), change=lambda x: x * (1 + 1e-7), noise=1e-3)
    judgement = case.judge()
    assert find_comparison(judgement, "0/0/./input").verdict is Verdict.PASS
    assert judgement.exit is Exit.UNJUDGED


def test_ranks_that_were_fed_different_data_are_not_judged(case: Case) -> None:
    ids = torch.arange(24).reshape(4, 6)
    case.add_trusted("0/0/./batch.ids", ids)
    for rank in range(2):
        case.candidate.record(rank, "0/0/./batch.ids", ids + rank, "...")
    judgement = case.judge()
    assert find_comparison(judgement, "0/0/./batch.ids").verdict is Verdict.CONFLICT
    assert judgement.exit is Exit.UNJUDGED
    assert not any("differ by 0.0e+00" in problem for problem in judgement.problems)


def test_a_wrong_input_made_from_the_right_batch_is_the_candidates_own_doing(case: Case) -> None:
    ids = torch.arange(24).reshape(4, 6)
    case.add("0/0/./batch.ids", ids)
    case.add("0/0/./input.positions", ids, change=lambda x: x + 1)
    case.add_wrong("0/0/embedding/input", "0/0/embedding/output", "0/0/./output")
    judgement = case.judge()
    assert judgement.exit is Exit.FOUND
    assert [str(f.comparison.id) for f in judgement.findings] == ["0/0/./input.positions"]


def test_gradients_before_reduction_are_compared_after_the_factor_still_to_come(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2", grad_factor=0.5)
    doubled = ("0/0/fc/grad_output", "0/0/fc/grad_input", "0/0/fc.weight/param_grad")
    for name in doubled:
        case.add(name, draw_tensor(4, 8), "a/dp b", lambda x: 2 * x)
    case.add("0/0/fc/output", draw_tensor(4, 8), "a/dp b")
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 8))
    judgement = case.judge()
    assert judgement.exit is Exit.PASSED
    assert judgement.notes == (
        "the candidate's loss and activation gradients were multiplied by 0.5 before comparing, because its reduction "
        "of gradients applies this factor later",
    )


@pytest.mark.parametrize("name", ["0/-/fc.weight/param_grad", "0/0/fc/output", "0/-/fc.weight/param_after"])
def test_final_gradients_and_everything_else_are_never_scaled(tmp_path: Path, name: str) -> None:
    case = Case(tmp_path, "dp=2", grad_factor=0.5)
    case.add(name, draw_tensor(4, 8), "a/dp b", lambda x: 2 * x)
    assert case.judge().exit is Exit.FOUND


def test_microbatches_that_the_reference_ran_together_are_parts_of_one_tensor(tmp_path: Path) -> None:
    case = Case(tmp_path, "pp=2", num_microbatches=4)
    for name, layout, ranks in (("0/-/x/output", "batch/mb hidden", [0]), ("0/-/y/output", "batch/mb hidden", [1])):
        case.add_trusted(name, draw_tensor(8, 6), layout=layout)
        case.candidate.record_parts(name, draw_tensor(8, 6), layout, ranks=ranks)
    case.add_trusted("0/-/./loss", torch.tensor(4.5), layout="+mb")
    case.candidate.record_parts("0/-/./loss", torch.tensor(4.5), "+mb", ranks=[1])
    judgement = case.judge()
    assert judgement.exit is Exit.PASSED, [(str(c.id), c.reason) for c in judgement.comparisons]


def test_a_lost_microbatch_is_a_gap(tmp_path: Path) -> None:
    case = Case(tmp_path, "", num_microbatches=4)
    case.add_trusted("0/-/x/output", draw_tensor(8, 6), layout="batch/mb hidden")
    case.add_trusted("0/-/./loss", torch.tensor(4.5), layout="+mb")
    for microbatch in range(3):
        rows = draw_tensor(8, 6)[2 * microbatch : 2 * microbatch + 2]
        case.candidate.record(0, "0/-/x/output", rows, "batch/mb hidden", shape=(8, 6), microbatch=microbatch)
        case.candidate.record(0, "0/-/./loss", torch.tensor(1.5), "+mb", shape=(), microbatch=microbatch)
    judgement = case.judge()
    assert [comparison.verdict for comparison in judgement.comparisons] == [Verdict.GAP, Verdict.GAP]
    assert describe(judgement.comparisons[0].why) == "in the candidate no rank holds 12 elements, the first at (6, 0)"
    assert describe(judgement.comparisons[1].why) == "in the candidate a summand over mb is missing"


def test_progress_is_told(case: Case) -> None:
    told: list[tuple[int, int]] = []
    case.add_right("0/0/head/output")
    traces = case.reference.close(), [case.twin.close()], case.candidate.close()
    check(*traces, progress=lambda done, total: told.append((done, total)))
    assert told == [(256, 512), (512, 512)]  # bytes


def test_notes_of_both_sides_are_passed_on(tmp_path: Path) -> None:
    case = Case(tmp_path, notes=("dropout switched off",))
    case.add_right("0/0/fc/output")
    assert case.judge().notes == ("dropout switched off",)


def test_a_reference_that_is_not_finite_is_no_success(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    case.add("0/-/fc.weight/param_grad", torch.full((4, 8), torch.nan), "a b/tp")
    judgement = case.judge()
    assert (
        describe(find_comparison(judgement, "0/-/fc.weight/param_grad").why)
        == "the reference or one of its twins is not finite"
    )
    assert judgement.exit is Exit.UNJUDGED


def test_order_is_the_references(tmp_path: Path) -> None:
    case = Case(tmp_path)
    reference = TraceBuilder(tmp_path / "reference", role="reference")
    for name in ("0/0/b/output", "0/0/a/output"):
        reference.record_parts(name, draw_tensor(4, 8))
    for name in ("0/0/extra/output", "0/0/a/output", "0/0/b/output"):
        case.candidate.record_parts(name, draw_tensor(4, 8), "a b/tp")
    judgement = check(reference.close(), [], case.candidate.close())
    assert [c.id.name for c in judgement.comparisons] == ["b", "a", "extra"]


def test_twins_that_nothing_moved_are_not_trusted(tmp_path: Path) -> None:
    case = Case(tmp_path, noise=0.0)
    case.add_right("0/0/fc/output")
    judgement = case.judge()
    assert judgement.exit is Exit.UNJUDGED
    assert any("the twins are the reference, bit for bit" in problem for problem in judgement.problems)


@pytest.mark.parametrize(("holders", "verdict"), [((0, 3), Verdict.PASS), ((0,), Verdict.GAP)])
def test_a_tied_weight_is_summed_over_the_stages_that_own_it(
    tmp_path: Path, holders: tuple[int, ...], verdict: Verdict
) -> None:
    name, full = "0/-/embedding.weight/main_grad", draw_tensor(4, 8)
    case = Case(tmp_path, "pp=4", owns={0: ["embedding.weight"], 3: ["embedding.weight"]})
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b")
    case.add_trusted(name, full)
    for rank in holders:
        case.candidate.record(rank, name, full / len(holders), "a b +pp")
    assert find_comparison(case.judge(), name).verdict is verdict
