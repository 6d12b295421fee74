"""What is said of one id: whether its shards make up the reference's tensor, and whether they are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, TraceBuilder, draw_tensor, find_comparison, nudge
from ttrace.judge.check import check, judge_candidate
from ttrace.judge.reason import Reason, Why, describe
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.tolerance.run_to_run import Noise
from ttrace.judge.tolerance.twins import replica_tolerance, unit
from ttrace.judge.verdict import CauseName, Comparison, Exit, Tolerance, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.layouts.layout import Layout
from ttrace.layouts.placement import INFERRED
from ttrace.layouts.region import Region
from ttrace.report.facts import list_facts

ID = "0/0/fc/output"
FULL = draw_tensor(8, 12)


def compared(case: Case, name: str = ID) -> Comparison:
    return find_comparison(case.judge(), name)


@pytest.mark.parametrize(
    "layout",
    ["a/tp b", "a b/tp", "a/tp:zigzag b", "a/tp:striped b", "a b/tp:fused(3)", "a b", "a b +tp", "a/tp:balanced b"],
)
def test_a_candidate_sharded_in_any_way_passes(tmp_path: Path, layout: str) -> None:
    case = Case(tmp_path)
    case.add(ID, FULL, layout)
    comparison = compared(case)
    assert comparison.verdict is Verdict.PASS, comparison
    assert comparison.stats.count == FULL.numel()


@pytest.mark.parametrize(
    "layout", ["a/dp b/tp", "a/tp:zigzag/dp b", "a/dp b +tp", "a b/tp +dp", "a b/tp", "a b +tp +dp"]
)
def test_two_axes_at_once_pass(tmp_path: Path, layout: str) -> None:
    case = Case(tmp_path, "dp=2 tp=2")
    case.add(ID, FULL, layout)
    assert compared(case).verdict is Verdict.PASS


def test_uneven_shards_pass(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=3")
    case.add(ID, draw_tensor(8, 7), "a b/tp")
    assert compared(case).verdict is Verdict.PASS


def test_flat_shards_pass(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=3")
    case.add_trusted(ID, draw_tensor(5, 7))
    for rank, (start, stop) in enumerate([(0, 11), (11, 30), (30, 35)]):
        region = Region.flat_of((5, 7), ((start, stop),))
        case.candidate.record(rank, ID, region.take(draw_tensor(5, 7)), region=region)
    assert compared(case).verdict is Verdict.PASS


@pytest.mark.parametrize("reference", ["a/cp:zigzag b", "a b/cp", "a b +cp", "a b"])
@pytest.mark.parametrize("candidate", ["a/tp b", "a b/tp:fused(3)", "a b +tp"])
def test_both_sides_may_be_sharded_each_in_its_own_way(tmp_path: Path, reference: str, candidate: str) -> None:
    trusted = TraceBuilder(tmp_path / "reference", "cp=4", "reference")
    trusted.record_parts(ID, FULL, reference)
    other = TraceBuilder(tmp_path / "candidate", "tp=2")
    other.record_parts(ID, FULL, candidate)
    comparison = find_comparison(check(trusted.close(), [], other.close()), ID)
    assert comparison.verdict is Verdict.PASS
    assert comparison.stats.count == FULL.numel()


def test_shards_are_never_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("shards were joined")

    monkeypatch.setattr(Region, "put", refuse)
    case = Case(tmp_path, "dp=2 tp=2")
    case.add(ID, FULL, "a/dp:zigzag b/tp")
    case.add("0/0/head/output", FULL, "a/dp b +tp", lambda x: 3 * x)
    assert case.judge().exit is Exit.FOUND


def test_a_pending_sum_is_wrong_if_its_sum_is(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add(ID, FULL, "a b +tp", lambda x: 1.5 * x)
    assert compared(case).verdict is Verdict.FAIL


def test_a_shard_in_the_wrong_place_fails(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_trusted(ID, FULL)
    for rank in range(2):
        case.candidate.record(rank, ID, FULL.chunk(2)[1 - rank], "a/tp b", shape=(8, 12))
    assert compared(case).verdict is Verdict.FAIL


@pytest.mark.parametrize("tp", [2, 4])
def test_replicas_that_differ_are_a_conflict(tmp_path: Path, tp: int) -> None:
    case = Case(tmp_path, f"tp={tp}")
    case.add_trusted(ID, FULL)
    for rank in range(tp):
        case.candidate.record(rank, ID, FULL * (1.01 if rank == tp - 1 else 1.0), "a b")
    comparison = compared(case)
    assert comparison.verdict is Verdict.CONFLICT
    assert describe(comparison.why) == "replicas differ by 1.0e-02"


def test_replicas_of_a_shard_that_differ_are_a_conflict(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2 tp=2")
    case.add_trusted(ID, FULL)
    for rank in range(4):
        part = FULL.chunk(2, dim=1)[rank % 2]
        case.candidate.record(rank, ID, part * (1.01 if rank == 3 else 1.0), "a b/tp", shape=(8, 12))
    assert compared(case).verdict is Verdict.CONFLICT


def replicas_one_bit_apart(case: Case, name: str) -> None:
    case.add_trusted(name, FULL)
    other = FULL.clone()
    other[3, 4] = torch.nextafter(other[3, 4], torch.tensor(9.0))
    for rank, replica in enumerate((FULL, other)):
        case.candidate.record(rank, name, replica, "a b")


@pytest.mark.parametrize("kind", ["output", "grad_output"])
def test_replicas_within_tolerance_pass(tmp_path: Path, kind: str) -> None:
    case = Case(tmp_path)
    replicas_one_bit_apart(case, f"0/0/fc/{kind}")
    assert compared(case, f"0/0/fc/{kind}").verdict is Verdict.PASS


def test_replicas_of_parameters_after_a_step_must_be_equal_to_the_bit(tmp_path: Path) -> None:
    case = Case(tmp_path)
    replicas_one_bit_apart(case, "0/-/fc.weight/param_after")
    replicas_one_bit_apart(case, "0/-/fc.weight/param_grad")
    judgement = case.judge()
    assert find_comparison(judgement, "0/-/fc.weight/param_after").verdict is Verdict.CONFLICT
    assert find_comparison(judgement, "0/-/fc.weight/param_grad").verdict is Verdict.PASS


@pytest.mark.parametrize(("layout", "num_gap"), [("a b/tp", 48), ("a/tp:zigzag b", 48)])
def test_elements_that_nobody_holds_are_a_gap(tmp_path: Path, layout: str, num_gap: int) -> None:
    case = Case(tmp_path)
    case.add_trusted(ID, FULL)
    case.candidate.record_parts(ID, FULL, layout, ranks=[0])
    comparison = compared(case)
    assert comparison.verdict is Verdict.GAP
    assert describe(comparison.why).startswith(f"in the candidate no rank holds {num_gap} elements, the first at ")
    assert comparison.spoils


def test_elements_that_the_reference_lacks_do_not_pass_unseen(tmp_path: Path) -> None:
    trusted = TraceBuilder(tmp_path / "reference", "tp=2", "reference")
    trusted.record_parts(ID, FULL, "a/tp b", ranks=[0])
    other = TraceBuilder(tmp_path / "candidate", "tp=2")
    other.record_parts(ID, torch.cat([FULL[:4], 7 * FULL[4:]]), "a/tp b")
    comparison = find_comparison(check(trusted.close(), [], other.close()), ID)
    assert comparison.verdict is Verdict.GAP
    assert describe(comparison.why) == "in the reference no rank holds 48 elements, the first at (4, 0)"


def test_a_missing_summand_is_a_gap(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_trusted(ID, FULL)
    case.candidate.record(0, ID, FULL, "a b +tp")
    comparison = compared(case)
    assert comparison.verdict is Verdict.GAP
    assert describe(comparison.why) == "in the candidate a summand over tp is missing"


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_an_id_on_one_side_only_is_missing(tmp_path: Path, side: str) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    {"reference": case.reference, "candidate": case.candidate}[side].record_parts("0/0/head/output", FULL)
    judgement = case.judge()
    comparison = find_comparison(judgement, "0/0/head/output")
    other = {"reference": "candidate", "candidate": "reference"}[side]
    assert (comparison.verdict, describe(comparison.why)) == (Verdict.MISSING, f"the {other} has no such tensor")
    assert judgement.exit is Exit.UNJUDGED


def test_a_rank_that_owns_the_module_but_recorded_nothing_is_missed(tmp_path: Path) -> None:
    case = Case(tmp_path, owns={1: ["fc"]})
    case.add("0/0/head/output", FULL, "a b/tp")
    case.add_trusted(ID, FULL)
    case.candidate.record_parts(ID, FULL, ranks=[0])
    comparison = compared(case)
    assert comparison.verdict is Verdict.MISSING
    assert describe(comparison.why) == "rank 1 owns the module but has no such tensor"


def test_ranks_of_other_pipeline_stages_are_not_missed(tmp_path: Path) -> None:
    case = Case(tmp_path, "pp=2 tp=2")
    for name, ranks in (("0/0/a/output", [0, 1]), ("0/0/b/output", [2, 3]), ("0/-/b.weight/param", [2, 3])):
        case.add_trusted(name, FULL)
        case.candidate.record_parts(name, FULL, "a b/tp", ranks=ranks)
    assert case.judge().exit is Exit.PASSED


def test_stages_without_loss_and_batch_are_not_missed_although_all_own_the_model(tmp_path: Path) -> None:
    case = Case(tmp_path, "pp=2", owns={0: ["."], 1: ["."]})
    case.add_trusted("0/0/a/output", FULL)
    case.candidate.record_parts("0/0/a/output", FULL, ranks=[0])
    case.add_trusted("0/0/./loss", torch.tensor(2.0))
    case.candidate.record_parts("0/0/./loss", torch.tensor(2.0), ranks=[1])
    case.add_trusted("0/0/./batch.ids", torch.arange(8))
    case.candidate.record_parts("0/0/./batch.ids", torch.arange(8), ranks=[0])
    judgement = case.judge()
    assert judgement.exit is Exit.PASSED, [(str(c.id), c.reason) for c in judgement.comparisons]


def test_microbatches_dealt_out_over_dp_are_not_missed(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2 tp=2", owns={rank: ["fc"] for rank in range(4)})
    for microbatch in range(4):
        name, dp = f"0/{microbatch}/fc/output", microbatch % 2
        case.add_trusted(name, FULL)
        case.candidate.record_parts(name, FULL, "a b/tp", ranks=[2 * dp, 2 * dp + 1])
    assert case.judge().exit is Exit.PASSED


def test_a_rank_that_ran_the_microbatch_is_missed_also_under_dp(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2 tp=2", owns={rank: ["fc"] for rank in range(4)})
    case.add("0/0/head/output", FULL, "a b/tp")
    case.add_trusted(ID, FULL)
    case.candidate.record_parts(ID, FULL, ranks=[0, 2, 3])
    assert describe(compared(case).why) == "rank 1 owns the module but has no such tensor"


def test_shapes_that_fit_several_layouts_are_not_judged(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2 tp=2")
    case.add_trusted(ID, FULL)
    for rank in range(4):
        case.candidate.record(rank, ID, FULL.chunk(2)[rank // 2])
    comparison = compared(case)
    assert comparison.verdict is Verdict.UNJUDGED
    assert describe(comparison.why) == "no layout: the ranks hold (4, 12) of (8, 12); add a rule for this site"


def test_the_number_of_microbatches_makes_no_shape_ambiguous(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2", num_microbatches=2)
    case.add_trusted(ID, FULL)
    for rank in range(2):
        case.candidate.record(rank, ID, FULL.chunk(2)[rank])
    assert compared(case).verdict is Verdict.PASS


@pytest.mark.parametrize("shape", [(8, 12), (4, 12), (8, 6)])
def test_one_fitting_layout_is_inferred_and_says_so(tmp_path: Path, shape: tuple[int, int]) -> None:
    case = Case(tmp_path)
    case.add_trusted(ID, FULL)
    for rank in range(2):
        rows, columns = (rank * 4 * (shape[0] == 4), rank * 6 * (shape[1] == 6))
        case.candidate.record(rank, ID, FULL[rows : rows + shape[0], columns : columns + shape[1]])
    comparison = compared(case)
    assert (comparison.verdict, comparison.by) == (Verdict.PASS, INFERRED)


def test_a_wrong_inference_fails(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_trusted(ID, FULL)
    for rank in range(2):
        zigzag = Layout.parse("a/tp:zigzag b").region((8, 12), {"tp": 2}, {"tp": rank})
        case.candidate.record(rank, ID, zigzag.take(FULL))
    comparison = compared(case)
    assert (comparison.verdict, comparison.by) == (Verdict.FAIL, INFERRED)


@pytest.mark.parametrize(("name", "verdict"), [(ID, Verdict.PASS), ("0/-/w/param_grad", Verdict.FAIL)])
def test_a_stated_split_orders_what_is_inferred_of_activations(tmp_path: Path, name: str, verdict: Verdict) -> None:
    """A framework that cuts sequences in zigzag order says nothing of parameters."""
    case = Case(tmp_path, "cp=2", splits={"cp": "zigzag"})
    case.add_trusted(name, FULL)
    for rank in range(2):
        zigzag = Layout.parse("a/cp:zigzag b").region((8, 12), {"cp": 2}, {"cp": rank})
        case.candidate.record(rank, name, zigzag.take(FULL))
    comparison = find_comparison(case.judge(), name)
    assert (comparison.verdict, comparison.by) == (verdict, INFERRED)


def test_an_axis_with_one_holder_does_not_cut(tmp_path: Path) -> None:
    """Ranks along dp have microbatches of their own: this one is held along ep only."""
    case = Case(tmp_path, "dp=2 ep=2")
    case.add_trusted(ID, FULL)
    for rank in range(2):
        case.candidate.record(rank, ID, FULL.chunk(2)[rank])
    comparison = find_comparison(case.judge(), ID)
    assert comparison.layout == "d0/ep d1"


def test_partial_sums_without_a_layout_are_no_pending_sum(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_trusted(ID, FULL)
    for rank, share in enumerate((0.3, 0.7)):
        case.candidate.record(rank, ID, FULL * share)
    assert compared(case).verdict is Verdict.CONFLICT


def test_different_shards_of_the_same_elements_are_not_judged(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_trusted(ID, FULL)
    for rank, (start, stop) in enumerate([(0, 5), (4, 8)]):
        region = Region((8, 12), (((start, stop),), ((0, 12),)))
        case.candidate.record(rank, ID, region.take(FULL), region=region)
    comparison = compared(case)
    assert comparison.verdict is Verdict.UNJUDGED
    assert describe(comparison.why) == "in the candidate different shards hold the same 12 elements"


def test_another_shape_is_not_judged(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_trusted(ID, FULL)
    case.candidate.record_parts(ID, draw_tensor(8, 16), "a b/tp")
    comparison = compared(case)
    assert comparison.verdict is Verdict.UNJUDGED
    assert describe(comparison.why) == "the candidate's shape (8, 16) is not the reference's (8, 12)"


def test_ranks_that_speak_of_different_shapes_are_not_judged(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_trusted(ID, FULL)
    for rank, rows in enumerate((8, 10)):
        region = Region((rows, 12), (((4 * rank, 4 * rank + 4),), ((0, 12),)))
        case.candidate.record(rank, ID, FULL[4 * rank : 4 * rank + 4], region=region)
    comparison = compared(case)
    assert comparison.verdict is Verdict.UNJUDGED
    assert "different shapes: (8, 12), (10, 12)" in describe(comparison.why)


def test_a_reference_without_a_layout_is_not_judged(tmp_path: Path) -> None:
    trusted = TraceBuilder(tmp_path / "reference", "tp=2", "reference")
    other = TraceBuilder(tmp_path / "candidate", "tp=2")
    for rank in range(2):
        trusted.record(rank, ID, FULL)
    other.record_parts(ID, FULL)
    comparison = find_comparison(check(trusted.close(), [], other.close()), ID)
    assert (comparison.verdict, describe(comparison.why)) == (Verdict.UNJUDGED, "the reference's layout is not known")


def test_infinities_that_both_sides_have_agree(tmp_path: Path) -> None:
    mask = draw_tensor(8, 12).masked_fill(torch.ones(8, 12).tril() == 0, -torch.inf)
    case = Case(tmp_path)
    case.add(ID, mask, "a b/tp")
    case.add("0/0/b/output", mask, "a b/tp", lambda x: x.roll(1, 0))
    judgement = case.judge()
    assert find_comparison(judgement, ID).verdict is Verdict.PASS
    assert find_comparison(judgement, "0/0/b/output").verdict is Verdict.FAIL


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_candidate_that_is_not_finite_fails_also_where_the_reference_is_mathematically_zero(
    tmp_path: Path, bad: float
) -> None:
    case = Case(tmp_path)
    case.add("0/-/key.bias/param_grad", FULL, "a b/tp", lambda x: x.index_fill(0, torch.tensor([1]), bad), noise=1.0)
    assert compared(case, "0/-/key.bias/param_grad").verdict is Verdict.FAIL


def test_every_region_is_measured_alone(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add(ID, FULL, "a/tp b", lambda x: torch.cat([x[:4], 2 * x[4:]]))
    parts = compared(case).region_errors
    assert [part.ranks for part in parts] == [(0,), (1,)]
    assert [part.error for part in parts] == [0.0, 1.0]


def test_empty_tensors_pass(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add(ID, torch.empty(0, 4))
    assert compared(case).verdict is Verdict.PASS


def test_a_rank_without_a_layout_has_that_of_its_peers(tmp_path: Path) -> None:
    for number, change in enumerate((0.0, 1.0)):
        case = Case(tmp_path / str(number))
        full = draw_tensor(4, 8)
        case.add_trusted("0/0/fc/output", full)
        case.candidate.record(0, "0/0/fc/output", full * 0.25, "a b +tp", shape=(4, 8))
        case.candidate.record(1, "0/0/fc/output", full * 0.75 + change)
        found = find_comparison(case.judge(), "0/0/fc/output")
        assert found.verdict is (Verdict.FAIL if change else Verdict.PASS), found
        assert found.layout == "a b +tp"


def test_a_rank_that_its_peers_layout_does_not_explain_is_not_accused(tmp_path: Path) -> None:
    case = Case(tmp_path)
    full = draw_tensor(4, 8)
    case.add_trusted("0/0/fc/output", full)
    case.candidate.record(0, "0/0/fc/output", full * 0.25, "a b +tp", shape=(4, 8))
    case.candidate.record(1, "0/0/fc/output", full[:2] * 0.75)
    assert find_comparison(case.judge(), "0/0/fc/output").verdict is Verdict.UNJUDGED


NORM, BIAS = "0/-/norm.running_mean/buffer_after", "0/-/router.bias/buffer_after"


def with_buffers(folder: Path, *, cut: bool) -> Case:
    """Two ranks whose running means differ; the router's bias must not. They have their own data, or parts of one."""
    case = Case(folder, "dp=2")
    case.reference.forward_buffers = ("norm.running_mean",)
    if cut:
        case.add("0/0/norm/output", FULL, "a/dp b")
    else:
        for microbatch in (0, 1):
            name = f"0/{microbatch}/norm/output"
            case.add_trusted(name, FULL)
            case.candidate.record_parts(name, FULL, ranks=[microbatch])
    case.add_trusted(NORM, draw_tensor(16))
    case.add_trusted(BIAS, draw_tensor(16))
    for rank in (0, 1):
        case.candidate.record(rank, NORM, draw_tensor(16) + rank, "a")
        case.candidate.record(rank, BIAS, draw_tensor(16), "a")
    return case


def test_statistics_of_own_microbatches_are_not_held_against_those_of_all(tmp_path: Path) -> None:
    judgement = with_buffers(tmp_path, cut=False).judge()
    found = find_comparison(judgement, NORM)
    assert (found.verdict, found.reason) == (Verdict.UNJUDGED, Reason.OWN_MICROBATCHES)
    assert found.tolerance is None, "there is nothing to hold it against"
    assert judgement.exit is Exit.PASSED
    assert any(describe(Why(Reason.OWN_MICROBATCHES)) in note for note in judgement.notes)


def with_statistics(folder: Path, name: str, momentum: float) -> Case:
    """A batch norm of two ranks, each with a microbatch of its own; the reference's has a momentum of 0.1."""
    case, rows = Case(folder, "dp=2"), [draw_tensor(32, 16, seed=seed) + draw_tensor(16) for seed in (1, 2)]
    case.reference.forward_buffers = (f"norm.{name}",)
    start = torch.zeros(16) if name == "running_mean" else torch.ones(16)
    batches = [batch.mean(0) if name == "running_mean" else 3 * batch.var(0) for batch in rows]
    case.add(f"0/-/norm.{name}/buffer", start)
    case.add_trusted(f"0/-/norm.{name}/buffer_after", start.lerp(batches[0], 0.1).lerp(batches[1], 0.1))
    for rank in (0, 1):
        case.add_trusted(f"0/{rank}/norm/output", FULL)
        case.candidate.record_parts(f"0/{rank}/norm/output", FULL, ranks=[rank])
        case.candidate.record(rank, f"0/-/norm.{name}/buffer_after", start.lerp(batches[rank], momentum), "a")
    return case


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
@pytest.mark.parametrize(("momentum", "is_explained"), [(0.1, True), (0.01, False), (-0.1, False)])
def test_statistics_of_own_microbatches_change_as_much_as_those_of_all(
    name: str, momentum: float, is_explained: bool, tmp_path: Path
) -> None:
    judgement = with_statistics(tmp_path, name, momentum).judge()
    found = find_comparison(judgement, f"0/-/norm.{name}/buffer_after")
    assert found.reason is (Reason.OWN_MICROBATCHES if is_explained else Reason.OTHER_STATISTICS)
    assert judgement.exit is (Exit.PASSED if is_explained else Exit.FOUND)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("running_var", -5.0, Reason.NEGATIVE_VARIANCE),
        ("running_var", 5.0, Reason.OWN_MICROBATCHES),
        ("running_mean", -5.0, Reason.OWN_MICROBATCHES),
        ("running_mean", torch.nan, Reason.NOT_FINITE),
    ],
)
def test_own_microbatches_do_not_explain_every_value(name: str, value: float, reason: Reason, tmp_path: Path) -> None:
    case = with_buffers(tmp_path, cut=False)
    case.reference.forward_buffers = (f"norm.{name}",)
    case.add_trusted(f"1/-/norm.{name}/buffer_after", 1 + draw_tensor(16).abs())
    for rank in (0, 1):
        case.candidate.record(rank, f"1/-/norm.{name}/buffer_after", torch.full((16,), value * rank), "a")
    judgement = case.judge()
    found = find_comparison(judgement, f"1/-/norm.{name}/buffer_after")
    assert found.reason is reason
    assert found.verdict is (Verdict.UNJUDGED if reason is Reason.OWN_MICROBATCHES else Verdict.FAIL)


def test_statistics_of_a_part_of_the_batch_are_wrong(tmp_path: Path) -> None:
    judgement = with_buffers(tmp_path, cut=True).judge()
    assert find_comparison(judgement, NORM).verdict is Verdict.CONFLICT
    assert [finding.module for finding in judgement.findings] == ["norm"]


def test_a_buffer_that_no_forward_pass_changes_is_judged_whoever_has_which_data(tmp_path: Path) -> None:
    case = with_buffers(tmp_path, cut=False)
    case.add_trusted(other := BIAS.replace("0/-", "1/-"), draw_tensor(16))
    for rank in (0, 1):
        case.candidate.record(rank, other, draw_tensor(16) + rank, "a")
    assert find_comparison(case.judge(), other).verdict is Verdict.CONFLICT


# A value that each data-parallel rank has of its own rows is judged as an average or a sum.


LOSS = "0/0/./output.loss"


def case_of(folder: Path, rows: list[torch.Tensor], whole: torch.Tensor, mesh: str = "dp=2") -> Case:
    case = Case(folder, mesh, batch_axes=("dp",))
    case.add("0/0/fc/output", draw_tensor(8, 4), "a/dp b")
    case.add_trusted(LOSS, whole)
    for rank, value in enumerate(rows):
        case.candidate.record(rank, LOSS, value)
    return case


@pytest.mark.parametrize(("factor", "word"), [(0.5, "average"), (1.0, "sum")])
def test_the_average_or_sum_of_all_ranks_is_right(tmp_path: Path, factor: float, word: str) -> None:
    rows = [torch.tensor(3.0), torch.tensor(5.0)]
    judgement = case_of(tmp_path, rows, factor * (rows[0] + rows[1])).judge()
    comparison = find_comparison(judgement, LOSS)
    assert (comparison.verdict, comparison.layout) == (Verdict.PASS, f"{word} over dp")
    assert judgement.exit is Exit.PASSED


def test_another_function_of_own_rows_is_left_to_what_follows_from_it(tmp_path: Path) -> None:
    judgement = case_of(tmp_path, [torch.tensor(3.0), torch.tensor(5.0)], torch.tensor(4.5)).judge()
    comparison = find_comparison(judgement, LOSS)
    assert (comparison.verdict, comparison.reason) == (Verdict.UNJUDGED, Reason.OWN_ROWS)
    assert judgement.exit is Exit.PASSED


def test_a_single_rank_that_is_off_is_accused(tmp_path: Path) -> None:
    judgement = case_of(tmp_path, [torch.tensor(3.0), torch.tensor(5.0)], torch.tensor(3.0)).judge()
    assert judgement.exit is Exit.FOUND


def test_ranks_with_the_same_rows_must_agree(tmp_path: Path) -> None:
    rows = [torch.tensor(value) for value in (3.0, 3.5, 5.0, 5.0)]
    judgement = case_of(tmp_path, rows, torch.tensor(4.0), "dp=2 tp=2").judge()
    assert find_comparison(judgement, LOSS).verdict is Verdict.CONFLICT


def test_without_a_divided_batch_replicas_must_agree(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    case.add("0/0/fc/output", draw_tensor(8, 4), "a/dp b")
    case.add_trusted(LOSS, torch.tensor(4.0))
    for rank in range(2):
        case.candidate.record(rank, LOSS, torch.tensor(3.0 + 2 * rank))
    assert case.judge().exit is Exit.FOUND


def test_gradients_of_what_all_ranks_share_are_summed(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2", batch_axes=("dp",), grad_factor=0.5)
    case.add("0/0/fc/output", draw_tensor(8, 4), "a/dp b")
    whole = draw_tensor(6, 4, seed=3)
    case.add_trusted("0/0/position/grad_output", whole)
    case.candidate.record(0, "0/0/position/grad_output", 2 * whole * 0.25)
    case.candidate.record(1, "0/0/position/grad_output", 2 * whole * 0.75)
    comparison = find_comparison(case.judge(), "0/0/position/grad_output")
    assert (comparison.verdict, comparison.layout) == (Verdict.PASS, "d0 d1 +dp")


# Replicas of final gradients: equal bit for bit where a framework reduced them, else to their own dtype's rounding.


GRAD = "0/-/fc.weight/param_grad"
FULL_REPLICAS = draw_tensor(16, 16)


def autocast_case(folder: Path, mesh: str = "dp=2", *, reduced: tuple[str, ...] = ()) -> Case:
    """As under autocast: activations in bfloat16, a float32 gradient that twins know to a percent."""
    case = Case(folder, mesh, reduced=reduced)
    half = draw_tensor(8, 8).to(torch.bfloat16)
    case.add_trusted("0/0/fc/output", half, noise=1e-2)
    for rank in range(case.candidate.mesh.num_ranks):
        case.candidate.record(rank, "0/0/fc/output", half, "a b")
    case.add_trusted(GRAD, FULL_REPLICAS, noise=1e-2)
    return case


def drifted(case: Case, *sizes: float) -> Comparison:
    """Each rank's gradient is off by a factor of its own."""
    for rank, size in enumerate(sizes):
        case.candidate.record(rank, GRAD, FULL_REPLICAS * (1 + size), "a b")
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
    case.candidate.record(0, GRAD, FULL_REPLICAS, "a b")
    case.candidate.record(1, GRAD, FULL_REPLICAS * (1 + last_bit), "a b")
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
        case.candidate.record(rank, GRAD, FULL_REPLICAS * (1 + rank * 1e-3), "a b")
        again.record(rank, GRAD, nudge(FULL_REPLICAS, 1e-3), "a b")
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
