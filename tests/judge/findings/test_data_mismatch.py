"""Where the two sides were fed different data, nothing that depends on it is accused."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.traces import Case, draw_tensor, find_comparison
from ttrace.judge.verdict import Exit, Verdict
from ttrace.trace.format import Attachment


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
