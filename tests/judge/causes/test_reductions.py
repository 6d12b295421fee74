"""Why something probably is wrong; and that nothing is claimed on a near miss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor, nudge
from ttrace.judge.verdict import Cause, CauseName

ID = "0/0/fc/output"
FULL = draw_tensor(8, 12)


def cause(case: Case) -> Cause:
    return case.judge().findings[0].cause


def changed(case: Case, layout: str, wrong: torch.Tensor, name: str = ID) -> Cause:
    case.add(name, FULL, layout, lambda _: wrong)
    return cause(case)


def replicated(case: Case, replicas: Sequence[torch.Tensor], layout: str = "a b", name: str = ID) -> Cause:
    case.add_trusted(name, FULL)
    for rank, replica in enumerate(replicas):
        case.candidate.record(rank, name, replica, layout, shape=tuple(FULL.shape))
    return cause(case)


def partial_sums(*shares: float) -> list[torch.Tensor]:
    """Different tensors that sum to the reference, the last one makes up for the others."""
    parts = [share * FULL + draw_tensor(8, 12, seed=i) for i, share in enumerate(shares[:-1], start=1)]
    return [*parts, FULL - sum(parts)]


@pytest.mark.parametrize("tp", [2, 4])
def test_replicas_that_sum_to_the_reference_are_a_missing_all_reduce(tmp_path: Path, tp: int) -> None:
    found = replicated(Case(tmp_path, f"tp={tp}"), partial_sums(*[1 / tp] * tp))
    assert found.name == CauseName.MISSING_ALL_REDUCE
    assert found.sentence == "replicas differ and sum to the reference: missing all-reduce over tp"
    assert found.axis == "tp"
    assert any(f"their sum over tp={tp} is the reference to" in line for line in found.evidence)


def test_a_missing_all_reduce_is_told_by_its_axis(tmp_path: Path) -> None:
    first, second = partial_sums(0.5, 0.5)
    found = replicated(Case(tmp_path, "dp=2 tp=2"), [first, first, second, second])
    assert found.sentence == "replicas differ and sum to the reference: missing all-reduce over dp"


def test_a_missing_all_reduce_of_shards_is_seen(tmp_path: Path) -> None:
    first, second = partial_sums(0.5, 0.5)
    replicas = [part for whole in (first, second) for part in whole.chunk(2)]
    found = replicated(Case(tmp_path, "dp=2 cp=2"), replicas, "a/cp b")
    assert (found.name, found.axis) == (CauseName.MISSING_ALL_REDUCE, "dp")


def test_a_missing_all_reduce_is_seen_on_a_mesh_of_two_factorisations(tmp_path: Path) -> None:
    first, second = partial_sums(0.5, 0.5)
    found = replicated(Case(tmp_path, "dp=2 tp=2 | edp=1 ep=4"), [first, second, first, second])
    assert (found.name, found.axis) == (CauseName.MISSING_ALL_REDUCE, "tp")


def test_a_missing_all_reduce_of_gradients_is_seen_through_the_factor_still_to_come(tmp_path: Path) -> None:
    replicas = [2 * part for part in partial_sums(0.5, 0.5)]
    found = replicated(Case(tmp_path, grad_factor=0.5), replicas, name="0/0/fc/grad_input")
    assert found.name == CauseName.MISSING_ALL_REDUCE


def test_a_missing_all_reduce_is_seen_where_one_rank_holds_zeros(tmp_path: Path) -> None:
    assert replicated(Case(tmp_path), [torch.zeros_like(FULL), FULL]).name == CauseName.MISSING_ALL_REDUCE


@pytest.mark.parametrize(
    "replicas",
    [
        [FULL, 1.01 * FULL],
        [0.5 * FULL, 0.51 * FULL],
        [torch.zeros_like(FULL), 1.001 * FULL],
        [FULL, torch.roll(FULL, 1, 0)],
        [part * 1.001 for part in partial_sums(0.5, 0.5)],
    ],
    ids=["near", "near the sum", "zero and near", "other rows", "sum off"],
)
def test_replicas_that_do_not_sum_to_the_reference_are_no_missing_all_reduce(
    tmp_path: Path, replicas: list[torch.Tensor]
) -> None:
    found = replicated(Case(tmp_path), replicas)
    assert found.name == CauseName.REPLICAS_DIFFER
    assert found.sentence == "replicas that must agree differ along tp"
    assert found.axis == "tp"


def test_a_loose_tolerance_claims_no_missing_all_reduce(tmp_path: Path) -> None:
    case = Case(tmp_path, noise=0.1)
    found = replicated(case, [FULL, -0.3 * FULL])
    assert found.name == CauseName.REPLICAS_DIFFER


def test_of_replicas_that_differ_the_wrong_ones_are_named(tmp_path: Path) -> None:
    found = replicated(Case(tmp_path, "tp=4"), [FULL, FULL, 2 * FULL, FULL])
    assert found.evidence[1:] == ("rank 2: error 1.0e+00",)


def test_replicas_of_parameters_that_drift_by_a_bit_name_their_axis(tmp_path: Path) -> None:
    other = FULL.clone()
    other[0, 0] = torch.nextafter(other[0, 0], torch.tensor(9.0))
    replicas = [FULL, FULL, other, other]
    found = replicated(Case(tmp_path, "dp=2 tp=2"), replicas, name="0/-/fc.weight/param_after")
    assert found.sentence == "replicas that must agree differ along dp"


@pytest.mark.parametrize(
    ("factor", "axis", "words"),
    [
        (2.0, "tp", "the candidate is 2 x the reference: scaled by tp (tp=2), as if summed once too often"),
        (1 / 3, "dp", "the candidate is 0.3333 x the reference: scaled by 1/dp (dp=3)"),
        (3.0, "dp", "the candidate is 3 x the reference: scaled by dp (dp=3), as if summed once too often"),
        (1.7, None, "the candidate is 1.7 x the reference"),
        (-1.0, None, "the candidate is -1 x the reference"),
    ],
)
def test_a_constant_factor_names_the_axis_whose_size_it_is(
    tmp_path: Path, factor: float, axis: str | None, words: str
) -> None:
    found = changed(Case(tmp_path, "dp=3 tp=2"), "a b/tp", factor * FULL)
    assert (found.name, found.axis, found.sentence) == (name_of(factor), axis, words)


def name_of(factor: float) -> CauseName:
    return CauseName.DOUBLE_REDUCTION if factor > 1.9 else CauseName.CONSTANT_FACTOR


def test_axes_of_the_same_size_are_both_named(tmp_path: Path) -> None:
    found = changed(Case(tmp_path, "dp=2 tp=2"), "a b/tp", FULL / 2)
    assert found.axis is None
    assert found.sentence == "the candidate is 0.5 x the reference: scaled by 1/dp or 1/tp (dp=2, tp=2)"


def test_axes_of_the_tensors_own_factorisation_are_suspected_first(tmp_path: Path) -> None:
    """An expert's gradient lies on the experts' mesh."""
    found = changed(Case(tmp_path, "fsdp=2 tp=1 | efsdp=1 ep=2"), "a/ep b", FULL / 2)
    assert found.axis == "ep"
    assert found.sentence == "the candidate is 0.5 x the reference: scaled by 1/ep (ep=2)"
    found = changed(Case(tmp_path / "dense", "fsdp=2 tp=1 | efsdp=1 ep=2"), "a/fsdp b", FULL / 2)
    assert found.axis == "fsdp"
    found = changed(Case(tmp_path / "wide", "fsdp=2 tp=2 | efsdp=1 ep=4"), "a/ep b", FULL / 2)
    assert found.sentence.endswith("scaled by 1/fsdp or 1/tp (fsdp=2, tp=2)")


def test_the_number_of_microbatches_explains_a_factor(tmp_path: Path) -> None:
    found = changed(Case(tmp_path, "tp=2", num_microbatches=4), "a b/tp", 4 * FULL)
    assert found.axis == "mb"
    assert found.sentence == "the candidate is 4 x the reference: scaled by the number of microbatches (mb=4)"


@pytest.mark.parametrize(
    ("name", "axis"), [("0/-/fc.weight/param_grad", "mb"), ("0/2/./output.loss", "mb"), ("0/2/head/output", None)]
)
def test_microbatches_are_counted_where_what_they_make_is_summed(tmp_path: Path, name: str, axis: str | None) -> None:
    case = Case(tmp_path)
    for microbatch in range(3):
        case.add_right(f"0/{microbatch}/fc/output")
    found = changed(case, "a b/tp", FULL / 3, name)
    assert (found.name, found.axis) == (CauseName.CONSTANT_FACTOR, axis)


def test_a_factor_with_something_else_on_top_is_not_claimed(tmp_path: Path) -> None:
    assert changed(Case(tmp_path), "a b/tp", 2 * nudge(FULL, 0.05)).name == CauseName.UNEXPLAINED


def test_a_factor_below_the_rest_is_not_claimed(tmp_path: Path) -> None:
    """Under a loose tolerance nearly everything is a factor and a rest."""
    case = Case(tmp_path, noise=0.1)
    assert changed(case, "a b/tp", 1.1 * FULL + 0.45 * draw_tensor(8, 12, seed=3)).name == CauseName.UNEXPLAINED


@pytest.mark.parametrize(("factor", "name"), [(1.3, CauseName.UNEXPLAINED), (2.0, CauseName.DOUBLE_REDUCTION)])
def test_one_number_is_a_multiple_of_another_only_where_an_axis_says_so(
    tmp_path: Path, factor: float, name: CauseName
) -> None:
    case = Case(tmp_path)
    case.add_right(ID)
    case.add("0/0/./loss", torch.tensor(2.5), "", lambda x: factor * x)
    assert cause(case).name == name


def test_zeros_are_zeros(tmp_path: Path) -> None:
    found = changed(Case(tmp_path), "a b/tp", torch.zeros_like(FULL))
    assert (found.name, found.sentence) == (CauseName.ZEROS, "the candidate is zero everywhere")


def test_one_element_that_is_not_zero_makes_no_zeros(tmp_path: Path) -> None:
    almost = torch.zeros_like(FULL)
    almost[0, 0] = FULL[0, 0]
    assert changed(Case(tmp_path), "a b/tp", almost).name != CauseName.ZEROS


def test_what_is_not_finite_is_counted(tmp_path: Path) -> None:
    wrong = FULL.clone()
    wrong[0, :2], wrong[7, 0] = torch.nan, torch.inf
    found = changed(Case(tmp_path), "a b/tp", wrong)
    assert found.name == CauseName.NOT_FINITE
    assert found.evidence == ("2 NaN and 1 infinite elements, the first at (0, 0) on rank 0",)


def test_only_some_ranks_are_named(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=4")
    wrong = torch.cat([*FULL.chunk(4)[:2], draw_tensor(2, 12, seed=5), FULL.chunk(4)[3]])
    found = changed(case, "a/tp b", wrong)
    assert (found.name, found.sentence) == (CauseName.SOME_RANKS, "only the shards of rank 2 are wrong")
    assert found.evidence[0].startswith("rank 2: error ")


def test_nothing_is_claimed_where_nothing_is_known(tmp_path: Path) -> None:
    found = changed(Case(tmp_path), "a b/tp", draw_tensor(8, 12, seed=5))
    assert (found.name, found.axis, found.evidence) == (CauseName.UNEXPLAINED, None, ())


def test_a_sum_over_another_axis_is_the_wrong_group(tmp_path: Path) -> None:
    first, second = (2 * part for part in partial_sums(0.5, 0.5))
    found = replicated(Case(tmp_path, "dp=2 tp=2"), [first, second, first, second])
    assert (found.name, found.axis) == (CauseName.WRONG_GROUP, "tp")
    assert found.sentence == "summed over dp instead of tp"
    assert found.evidence[0].startswith("the sum over tp=2 is 2 x the reference to ")


def test_of_gradients_twice_the_sum_is_a_missing_average_rather(tmp_path: Path) -> None:
    first, second = (2 * part for part in partial_sums(0.5, 0.5))
    name = "0/-/fc.weight/param_grad"
    found = replicated(Case(tmp_path, "dp=2 tp=2"), [first, first, second, second], name=name)
    assert (found.name, found.axis) == (CauseName.MISSING_AVERAGE, "dp")


def test_a_sum_that_is_no_multiple_by_an_axis_names_no_group(tmp_path: Path) -> None:
    first, second = (3 * part for part in partial_sums(0.5, 0.5))
    found = replicated(Case(tmp_path, "dp=2 tp=2"), [first, second, first, second])
    assert (found.name, found.axis) == (CauseName.REPLICAS_DIFFER, "tp")


@pytest.mark.parametrize(
    ("kind", "factor", "words"),
    [
        ("grad_norm", 2**0.5, "their norm is 1.414 x the reference's; its square is scaled by tp (tp=2)"),
        ("grad_norm", 0.5**0.5, "their norm is 0.7071 x the reference's; its square is scaled by 1/tp (tp=2)"),
        ("clip", 0.5**0.5, "their norm is 1.414 x the reference's; its square is scaled by tp (tp=2)"),
        ("grad_norm", 1.2, "their norm is 1.2 x the reference's"),
    ],
)
def test_a_wrong_norm_of_right_gradients_says_what_was_counted(
    tmp_path: Path, kind: str, factor: float, words: str
) -> None:
    case = Case(tmp_path)
    case.add_right(ID, "0/-/fc.weight/param_grad")
    case.add(f"0/-/./{kind}", torch.tensor(3.0), "", lambda x: x * factor)
    found = cause(case)
    assert (found.name, found.sentence) == (CauseName.GRADIENT_NORM, f"the gradients are right, but {words}")


def test_a_wrong_clip_factor_of_a_right_norm_is_told_apart(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right(ID)
    case.add("0/-/./grad_norm", torch.tensor(3.0), "")
    case.add("0/-/./clip", torch.tensor(0.25), "", lambda x: 2 * x)
    found = cause(case)
    words = "gradients and their norm are right, but the clip factor is 2 x the reference's"
    assert (found.name, found.sentence) == (CauseName.CLIP_FACTOR, words)


def test_an_updates_factor_is_no_axis(tmp_path: Path) -> None:
    """Its gradient is right, so nothing was summed too often."""
    case, update = Case(tmp_path, "tp=3"), 1e-2 * draw_tensor(8, 12, seed=1)
    case.add_right(ID)
    case.add("0/-/fc.weight/param", FULL, "a b/tp", noise=0.0)
    case.add("0/-/fc.weight/param_after", FULL + update, "a b/tp", lambda x: x + 2 * update, noise=1e-8)
    found = cause(case)
    assert (found.name, found.axis, found.sentence) == (
        CauseName.CONSTANT_FACTOR,
        None,
        "the candidate is 3 x the reference",
    )


def test_replicas_that_average_to_the_reference_miss_their_averaging(tmp_path: Path) -> None:
    full = draw_tensor(4, 8)
    other = draw_tensor(4, 8, seed=5)
    case = Case(tmp_path, "dp=2")
    case.add_trusted("0/-/fc.weight/param_grad", full)
    case.add_right()
    for rank, local in enumerate((full + other, full - other)):
        case.candidate.record(rank, "0/-/fc.weight/param_grad", local, "a b")
    found = case.judge().findings[0].cause
    assert found.sentence == "replicas differ and average to the reference: missing gradient averaging over dp"
    assert found.axis == "dp"


def test_gradients_may_be_averaged_after_they_were_clipped(tmp_path: Path) -> None:
    full = draw_tensor(4, 8)
    other = draw_tensor(4, 8, seed=5)
    case = Case(tmp_path, "dp=2")
    case.add_trusted("0/-/fc.weight/param_grad", full)
    case.add("0/-/./clip", torch.tensor(0.5), "")
    for rank, local in enumerate((full + other, full - other)):
        case.candidate.record(rank, "0/-/fc.weight/param_grad", local, "a b")
    found = case.judge().findings[0].cause
    assert found.sentence.endswith("missing gradient averaging over dp before gradients are clipped")


def test_a_bias_of_each_replica_does_not_hide_the_missing_all_reduce(tmp_path: Path) -> None:
    full, part, bias = draw_tensor(4, 8), draw_tensor(4, 8, seed=5), draw_tensor(8, seed=6)
    case = Case(tmp_path, "tp=2")
    case.add_trusted("0/0/fc/output", full + bias)
    for rank, local in enumerate((part + bias, full - part + bias)):
        case.candidate.record(rank, "0/0/fc/output", local, "a b")
    found = case.judge().findings[0].cause
    assert found.name == CauseName.MISSING_ALL_REDUCE
    assert found.sentence.endswith("plus a bias of each: missing all-reduce over tp")
