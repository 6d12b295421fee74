"""What a correct candidate does but nobody stated is neither accused nor passed silently."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor, find_comparison
from ttrace.judge.reason import Reason, describe
from ttrace.judge.verdict import CauseName, Comparison, Exit, Judgement, Verdict
from ttrace.layouts.ids import Kind
from ttrace.layouts.placement import INFERRED
from ttrace.trace.format import Attachment


def partial_sums(case: Case, name: str, full: torch.Tensor) -> None:
    """Every rank of tp=2 holds a part of the sum, and nobody says so."""
    part = draw_tensor(*full.shape, seed=7)
    case.reference.record(0, name, full, "a b")
    case.twin.record(0, name, full * (1 + 1e-7), "a b")
    for rank, local in enumerate((part, full - part)):
        case.candidate.record(rank, name, local)


def test_a_sum_that_the_parent_finishes_asks_for_a_rule(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    partial_sums(case, "0/0/attn.proj/output", draw_tensor(4, 8))
    case.add("0/0/attn/output", draw_tensor(4, 8, seed=1))
    case.add("0/-/attn.qkv.weight/param", draw_tensor(4, 8, seed=2), "a/tp b")
    judgement = case.judge()
    assert judgement.exit is Exit.UNJUDGED
    assert not judgement.findings
    site = next(c for c in judgement.comparisons if c.id.name == "attn.proj")
    assert site.verdict is Verdict.UNJUDGED
    assert site.by == INFERRED
    assert describe(site.why).endswith('add the rule "attn.proj/output": "... +tp"')


def test_a_sum_that_nobody_finishes_is_a_missing_all_reduce(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    partial_sums(case, "0/0/attn.proj/output", draw_tensor(4, 8))
    partial_sums(case, "0/0/attn/output", draw_tensor(4, 8))
    case.add("0/-/attn.qkv.weight/param", draw_tensor(4, 8, seed=2), "a/tp b")
    judgement = case.judge()
    assert judgement.exit is Exit.FOUND
    assert judgement.findings[0].cause.name == CauseName.MISSING_ALL_REDUCE


def test_a_factor_that_averaging_will_apply_asks_to_be_stated(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    for name in ("0/0/fc/grad_output", "0/0/fc/grad_input"):
        case.add(name, draw_tensor(4, 8), "a/dp b", lambda x: 2 * x)
    case.add("0/0/fc/output", draw_tensor(4, 8), "a/dp b")
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 8))
    judgement = case.judge()
    assert judgement.exit is Exit.UNJUDGED
    assert any("attach(grad_factor=0.5)" in problem for problem in judgement.problems)


def test_a_factor_that_reaches_final_gradients_is_a_finding(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    case.add("0/0/fc/grad_output", draw_tensor(4, 8), "a/dp b", lambda x: 2 * x)
    case.add("0/0/fc/output", draw_tensor(4, 8), "a/dp b")
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 8), change=lambda x: 2 * x)
    assert case.judge().exit is Exit.FOUND


def test_a_factor_at_some_sites_only_is_not_still_to_come(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    case.add("0/0/fc/grad_output", draw_tensor(4, 8), "a/dp b")
    case.add("0/0/fc/grad_input", draw_tensor(4, 8, seed=1), "a/dp b", lambda x: 2 * x)
    case.add("0/0/fc/output", draw_tensor(4, 8), "a/dp b")
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 8))
    judgement = case.judge()
    assert judgement.exit is Exit.FOUND
    assert judgement.findings[0].cause.sentence.startswith("the candidate is 2 x the reference: scaled by dp (dp=2)")


@pytest.mark.parametrize("is_reduced", [True, False])
def test_what_microbatches_add_is_accused_only_if_nobody_reduces_it(tmp_path: Path, is_reduced: bool) -> None:
    """A wrong final gradient that all ranks have tells its own story: here the first microbatch counted twice."""
    case, parts = Case(tmp_path, "tp=2"), [draw_tensor(4, 8, seed=seed) for seed in (1, 2)]
    for mb, part in enumerate(parts):
        partial_sums(case, f"0/{mb}/norm.weight/param_grad", part)
    if is_reduced:
        case.add("0/-/norm.weight/param_grad", parts[0] + parts[1], change=lambda _: 2 * parts[0] + parts[1])
    else:
        partial_sums(case, "0/-/norm.weight/param_grad", parts[0] + parts[1])
    finding = case.judge().findings[0]
    assert (finding.comparison.id.microbatch is None) == is_reduced
    assert finding.cause.name == (CauseName.MICROBATCHES if is_reduced else CauseName.MISSING_ALL_REDUCE)


def test_an_unexplained_error_names_the_cuts_that_were_only_inferred(tmp_path: Path) -> None:
    """A fused weight whose parts are cut one by one is taken for one that is cut in blocks."""
    case = Case(tmp_path, "tp=2")
    weight = draw_tensor(8, 4, seed=2)
    case.add_trusted("0/-/attn.qkv.weight/param", weight)
    for rank in range(2):
        case.candidate.record(rank, "0/-/attn.qkv.weight/param", weight.chunk(2)[rank].contiguous())
    case.add("0/0/attn/output", draw_tensor(4, 8, seed=1), "a b", lambda x: x + 0.3 * draw_tensor(4, 8, seed=5))
    [finding] = case.judge().findings
    assert finding.cause.name is CauseName.UNEXPLAINED
    assert "inferred from their shapes: attn.qkv.weight (d0/tp d1)" in finding.cause.evidence[-1]
    assert "fused(3)" in finding.cause.evidence[-1]


def call_of(judgement: Judgement) -> Comparison:
    return next(c for c in judgement.comparisons if c.id.kind is Kind.CALL)


def test_a_result_before_a_collective_is_not_accused(tmp_path: Path) -> None:
    """A bias that each rank adds before the sum: the output is wrong, and what was summed is only partial."""
    case, bias = Case(tmp_path, "tp=2"), draw_tensor(8, seed=5)
    partial_sums(case, "0/0/proj/call.clone.0", draw_tensor(4, 8) + 2 * bias)
    case.add("0/0/proj/output", draw_tensor(4, 8), change=lambda x: x + bias)
    judgement = case.judge()
    assert call_of(judgement).verdict is Verdict.UNJUDGED
    assert judgement.findings


def test_a_partial_result_whose_sum_is_missing_is_not_accused(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    partial_sums(case, "0/0/proj/call.linear.0", draw_tensor(4, 8))
    partial_sums(case, "0/0/proj/output", draw_tensor(4, 8))
    judgement = case.judge()
    assert call_of(judgement).verdict is Verdict.UNJUDGED
    assert judgement.findings[0].cause.name == CauseName.MISSING_ALL_REDUCE


def test_a_result_that_differs_like_the_output_is_accused(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    for name in ("0/0/proj/call.gelu.0", "0/0/proj/output"):
        case.add_trusted(name, draw_tensor(4, 8))
        for rank in range(2):
            case.candidate.record(rank, name, draw_tensor(4, 8) + rank * draw_tensor(4, 8, seed=9), "...")
    assert call_of(case.judge()).verdict is Verdict.CONFLICT


# Where the two sides were fed different data, nothing that depends on it is accused.


def test_another_number_of_microbatches_is_said_once_and_accuses_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    case.add_trusted("0/0/./batch.0", draw_tensor(8, 4))
    case.add("0/-/fc.weight/param", draw_tensor(4, 4))
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 4), change=lambda x: x + draw_tensor(4, 4, seed=5))
    case.add_trusted("0/0/fc/output", draw_tensor(8, 4))
    for rank in range(2):
        case.candidate.record(rank, f"0/{rank}/./batch.0", draw_tensor(8, 4, seed=rank), "...")
        case.candidate.record(rank, f"0/{rank}/fc/output", draw_tensor(8, 4, seed=rank), "...")
    judgement = case.judge()
    assert judgement.exit is Exit.UNJUDGED
    assert judgement.findings == ()
    assert judgement.problems[0] == (
        "the two sides trained on different data: the reference ran 1 microbatch of 8 rows, the candidate ran 2 "
        "microbatches of 8 rows on dp=2. Nothing that depends on the data was judged. Let the reference run the "
        "candidate's 2 microbatches too (accumulate their gradients, each loss divided by 2), or give each rank 8 / 2 "
        "rows of the reference's batch."
    )
    assert find_comparison(judgement, "0/-/fc.weight/param_grad").verdict is Verdict.UNJUDGED
    assert find_comparison(judgement, "0/-/fc.weight/param").verdict is Verdict.PASS


def test_a_batch_that_cannot_be_compared_accuses_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    case.add_trusted("0/0/./batch.0", draw_tensor(8, 4))
    for rank in range(2):
        case.candidate.record(rank, "0/0/./batch.0", draw_tensor(3, 4))
    case.add("0/0/fc/output", draw_tensor(8, 4), change=lambda x: x + 1)
    judgement = case.judge()
    assert judgement.exit is Exit.UNJUDGED
    assert judgement.findings == ()
    assert any("it is not known whether both sides were fed the same data" in p for p in judgement.problems)


def test_parameters_that_differ_from_the_start_are_a_finding_whatever_the_data(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    case.add("0/0/./batch.0", torch.arange(8), change=lambda x: x + 1)
    case.add("0/-/fc.weight/param", draw_tensor(4, 4), change=lambda x: x + 1)
    case.add("0/0/fc/output", draw_tensor(8, 4), change=lambda x: x + 1)
    judgement = case.judge()
    assert [str(f.comparison.id) for f in judgement.findings] == ["0/-/fc.weight/param"]


FOUND = Attachment(
    model="GPT", optimizers=("AdamW",), data="arguments of the model's call", num_microbatches=1, labels=False
)


def test_a_loss_that_differs_alone_is_not_judged_where_labels_are_unknown(tmp_path: Path) -> None:
    for number, (found, exit_) in enumerate(
        [(FOUND, Exit.UNJUDGED), (FOUND.model_copy(update={"labels": True}), Exit.FOUND), (None, Exit.FOUND)]
    ):
        case = Case(tmp_path / str(number), "dp=2", attachment=found)
        case.add("0/0/./output", draw_tensor(8, 4))
        case.add("0/0/./loss", torch.tensor(2.0), change=lambda x: x * 1.5)
        case.add("0/-/fc.weight/param_grad", draw_tensor(4, 4), change=lambda x: x * 1.5)
        judgement = case.judge()
        assert judgement.exit is exit_
        assert bool(judgement.findings) == (exit_ is Exit.FOUND)
        assert any("it is not known where labels enter" in p for p in judgement.problems) == (not judgement.findings)


def test_outputs_that_differ_are_judged_even_where_labels_are_unknown(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2", attachment=FOUND)
    case.add("0/0/./output", draw_tensor(8, 4), change=lambda x: x * 1.5)
    case.add("0/0/./loss", torch.tensor(2.0), change=lambda x: x * 1.5)
    assert case.judge().exit is Exit.FOUND


def test_labels_that_were_kept_are_compared_where_both_sides_have_them(tmp_path: Path) -> None:
    case = Case(tmp_path / "other", "dp=2")
    case.add("0/0/labels/batch.target", torch.arange(8), change=lambda x: x + 1)
    case.add("0/0/./output", draw_tensor(8, 4))
    case.add("0/0/./loss", torch.tensor(2.0), change=lambda x: x * 1.5)
    judgement = case.judge()
    assert judgement.exit is Exit.UNJUDGED
    assert "0/0/labels/batch.target: the candidate was fed other data" in judgement.problems[0]

    case = Case(tmp_path / "absent", "tp=2")
    case.add_trusted("0/0/labels/batch.target", torch.arange(8))
    case.add("0/0/./output", draw_tensor(8, 4), "b d/tp")
    judgement = case.judge()
    assert judgement.exit is Exit.PASSED
    assert [str(c.id) for c in judgement.comparisons] == ["0/0/./output"]


# Scripts that keep their data: what sums over all samples is judged if both sides had the same ones in total.


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


# Data that were replaced: a note says if the candidate's ranks loaded the same rows.


Rows = dict[str, tuple[str, ...]]
REPEATED_ROWS = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("reference", "candidate", "is_noted"),
    [
        ({"x": REPEATED_ROWS}, ({"x": ("a", "b")}, {"x": ("a", "b")}), True),
        ({"x": REPEATED_ROWS}, ({"x": ("a", "b")}, {"x": ("c", "d")}), False),
        ({"x": REPEATED_ROWS}, ({"x": ("e", "g")}, {"x": ("f", "h")}), False),  # shuffled otherwise
        (
            {"x": REPEATED_ROWS},
            ({"x": REPEATED_ROWS}, {"x": REPEATED_ROWS}),
            False,
        ),  # every rank loads the global batch
        ({"x": REPEATED_ROWS}, ({"x": ("a", "b")}, {}), False),  # fewer rows: only some ranks load
        ({"x": ("a", "a", "b", "c")}, ({"x": ("a", "b")}, {"x": ("a", "b")}), False),  # rows repeat by themselves
        (
            {"x": REPEATED_ROWS, "y": ("1", "2", "3", "4")},
            ({"x": REPEATED_ROWS, "y": ("1", "2")}, {"y": ("1", "2")}),
            False,
        ),
    ],
)
def test_ranks_that_load_the_same_rows_are_noted(
    reference: dict[str, tuple[str, ...]],
    candidate: tuple[dict[str, tuple[str, ...]], ...],
    is_noted: bool,
    tmp_path: Path,
) -> None:
    case = Case(tmp_path, "dp=2")
    case.reference.replaced[0] = {f"0/{slot}": rows for slot, rows in reference.items()}
    for rank, slots in enumerate(candidate):
        case.candidate.replaced[rank] = {f"0/{slot}": rows for slot, rows in slots.items()}
    case.add("0/0/fc/output", draw_tensor(4, 4), "a/dp b")
    judgement = case.judge()
    assert judgement.exit is Exit.PASSED
    notes = [note for note in judgement.notes if note.startswith("the script's own data were replaced")]
    assert len(notes) == is_noted
    if is_noted:
        assert "the reference loaded 4 different rows, the candidate loaded only 2" in notes[0]


@pytest.mark.parametrize(("mesh", "is_noted"), [("tp=2", True), ("dp=2", False), ("dp=2 tp=1", False)])
def test_ranks_of_tp_that_load_different_rows_are_noted(mesh: str, is_noted: bool, tmp_path: Path) -> None:
    case = Case(tmp_path, mesh)
    for rank in (0, 1):
        case.candidate.replaced[rank] = {"0/x": REPEATED_ROWS[2 * rank : 2 * rank + 2]}
    case.add("0/0/fc/output", draw_tensor(4, 4), f"a b/{mesh[:2]}")
    judgement = case.judge()
    assert judgement.exit is Exit.PASSED
    assert any("Do all ranks of tp load the same data?" in note for note in judgement.notes) is is_noted


@pytest.mark.parametrize(
    ("num_samples", "reduced", "expected"),
    [
        ((512, 512), ("dp",), Exit.UNJUDGED),
        ((512, 0), ("dp",), Exit.PASSED),  # one rank's loader is not known
        ((512, 512), (), Exit.PASSED),  # nothing shows that ranks need rows of their own
        ((4, 4), ("dp",), Exit.PASSED),  # there are no other rows
    ],
)
def test_ranks_that_load_the_same_of_many_rows_are_no_success(
    num_samples: tuple[int, int], reduced: tuple[str, ...], expected: Exit, tmp_path: Path
) -> None:
    case = Case(tmp_path, "dp=2", reduced=reduced)
    case.reference.replaced[0] = {"0/x": REPEATED_ROWS}
    for rank in (0, 1):
        case.candidate.replaced[rank] = {"0/x": REPEATED_ROWS[:2]}
        case.candidate.num_samples[rank] = num_samples[rank]
    case.add("0/0/fc/output", draw_tensor(4, 4), "a/dp b")
    judgement = case.judge()
    assert judgement.exit is expected
    sentences = (*judgement.problems, *judgement.notes)
    assert sum("the candidate loaded only 2" in sentence for sentence in sentences) == 1
