"""What is said of updates that were left out, done twice, or not alike in all copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor
from ttrace.judge.reason import describe
from ttrace.judge.verdict import Cause, CauseName, Finding, Verdict

NAME = "0/-/fc.weight"
FULL, UPDATE = draw_tensor(4, 8), 1e-2 * draw_tensor(4, 8, seed=1)


def updated(
    case: Case, changes: list[torch.Tensor], layout: str = "a b", *, before: torch.Tensor = FULL, step: float = 1.0
) -> Finding:
    """A parameter whose update is a change of each rank's own, by an optimizer that counts its steps."""
    case.add_trusted(f"{NAME}/param", before, noise=0.0)
    case.add_trusted(f"{NAME}/param_after", before + UPDATE, noise=1e-8)
    for rank, change in enumerate(changes):
        case.candidate.record(rank, f"{NAME}/param", before, layout)
        case.candidate.record(rank, f"{NAME}/param_after", before + change, layout)
    case.add(f"{NAME}/optim.step", torch.tensor(1.0), "", lambda _: torch.tensor(step))
    return case.judge().findings[0]


def cause(case: Case, *changes: torch.Tensor) -> Cause:
    return updated(case, list(changes)).cause


def test_the_finding_is_the_update_and_not_what_it_was_added_to(tmp_path: Path) -> None:
    assert updated(Case(tmp_path), [3 * UPDATE] * 2).comparison.id.kind == "update"


def test_a_parameter_left_as_it_was_is_not_updated(tmp_path: Path) -> None:
    found = cause(Case(tmp_path), torch.zeros_like(FULL), torch.zeros_like(FULL))
    assert (found.name, found.sentence) == (CauseName.NOT_UPDATED, "the optimizer left this parameter as it was")


@pytest.mark.parametrize("stale", [0, 1])
def test_an_update_that_never_arrived_names_its_rank(tmp_path: Path, stale: int) -> None:
    changes = [UPDATE, UPDATE]
    changes[stale] = torch.zeros_like(FULL)
    found = cause(Case(tmp_path), *changes)
    assert found.name == CauseName.NOT_UPDATED
    assert found.sentence == f"rank {stale} left this parameter as it was: the update never arrived there"
    assert found.evidence[0].startswith("the update of all other ranks is the reference's to ")


def test_of_one_rank_without_an_update_and_one_with_a_wrong_one_nothing_is_claimed(tmp_path: Path) -> None:
    assert cause(Case(tmp_path), torch.zeros_like(FULL), 1.5 * UPDATE).name == CauseName.REPLICAS_DIFFER


def test_twice_the_update_is_updated_twice(tmp_path: Path) -> None:
    found = cause(Case(tmp_path), 2 * UPDATE, 2 * UPDATE)
    assert found.name == CauseName.UPDATED_TWICE
    assert found.sentence == "the update is 2 x the reference's, whose gradient is the same: updated twice"


def test_the_update_of_two_steps_is_updated_twice(tmp_path: Path) -> None:
    case, second = Case(tmp_path), 1e-2 * draw_tensor(4, 8, seed=2)
    case.add("1/-/fc.weight/param", FULL + UPDATE, change=lambda x: x + second)
    case.add("1/-/fc.weight/param_after", FULL + UPDATE + second)
    found = cause(case, UPDATE + second, UPDATE + second)
    assert (found.name, found.sentence) == (
        CauseName.UPDATED_TWICE,
        "the update is that of two steps of the reference: updated twice",
    )


@pytest.mark.parametrize("factor", [1.9, 3.0, -2.0])
def test_another_multiple_is_not_updated_twice(tmp_path: Path, factor: float) -> None:
    assert cause(Case(tmp_path), factor * UPDATE, factor * UPDATE).name == CauseName.CONSTANT_FACTOR


def tied(case: Case, owners: dict[str, list[int]]) -> Cause:
    """A weight that two stages hold and update differently; in the reference it has two names."""
    case.reference._manifest["aliases"] = {"head.weight": "fc.weight"}
    for module, ranks in owners.items():
        case.add_trusted(f"0/0/{module}/output", FULL)
        case.candidate.record_parts(f"0/0/{module}/output", FULL, ranks=ranks)
    return cause(case, UPDATE, UPDATE + draw_tensor(4, 8, seed=5))


def test_tied_copies_that_diverged_are_named(tmp_path: Path) -> None:
    found = tied(Case(tmp_path, "pp=2"), {"fc": [0], "head": [1]})
    assert found.name == CauseName.TIED_COPIES
    assert found.sentence == "tied copies of one weight diverged: fc.weight (rank 0) and head.weight (rank 1)"
    assert found.evidence[0].startswith("replicas differ by ")


def test_copies_that_ranks_hold_under_both_names_are_plain_replicas(tmp_path: Path) -> None:
    assert tied(Case(tmp_path, "pp=2"), {"fc": [0, 1], "head": [0, 1]}).name == CauseName.REPLICAS_DIFFER


def test_a_copy_that_goes_by_the_first_name_is_named_too(tmp_path: Path) -> None:
    found = tied(Case(tmp_path, "pp=2"), {"fc": [0], "other": [1]})
    assert (
        found.sentence == "tied copies of one weight diverged: fc.weight (rank 0) and a copy in another module (rank 1)"
    )


def test_an_optimizer_that_counts_other_steps_is_named(tmp_path: Path) -> None:
    change = 0.7 * UPDATE + 1e-3 * draw_tensor(4, 8, seed=5)
    found = updated(Case(tmp_path), [change, change], step=2.0).cause
    assert found.name == CauseName.STEP_COUNT
    assert found.sentence == "the optimizer counts this as step 2, the reference's as step 1"


@pytest.mark.parametrize("factor", [0.25, 1.0])
def test_clipping_on_one_side_is_named_if_it_changes_something(tmp_path: Path, factor: float) -> None:
    case = Case(tmp_path)
    for rank in range(2):
        case.candidate.record(rank, "0/-/./clip", torch.tensor(factor), "")
    found = updated(case, [0.25 * UPDATE, 0.25 * UPDATE])
    words = "only the candidate clips gradients: it multiplies them by 0.25"
    assert (found.cause.sentence == words) == (factor == 0.25)
    [missing] = [c for c in case.judge().comparisons if c.verdict is Verdict.MISSING]
    assert describe(missing.why) == "only the candidate clips gradients"
