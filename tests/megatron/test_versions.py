"""Unmodified megatron-core of several versions: what the adapter knows holds for all of them."""

from __future__ import annotations

import pytest

from ttrace.judge.verdict import Exit
from zoo.harness.megatron.case import Case
from zoo.harness.megatron.traced import outcomes
from zoo.harness.results import Outcome

pytestmark = [pytest.mark.megatron, pytest.mark.nightly]

BF16 = "bfloat16"
DENSE = Case(layers=2)
EXPERTS = Case(layers=2, experts=4, bias=False)


def of(case: Case, **settings: object) -> Case:
    return Case(**{**vars(case), **settings})


CASES = [
    of(DENSE, tp=2, sp=True),
    of(DENSE, zero=True),
    of(DENSE, pp=2),
    of(DENSE, cp=2),
    of(DENSE, tp=2, sp=True, dtype=BF16),
    of(DENSE, zero=True, dtype=BF16),
    of(EXPERTS, ep=2),
    of(EXPERTS, tp=2, sp=True),
    of(DENSE, pp=2, vpp=2, layers=4),
]
VERSIONS = ("0.9.0", "0.11.0", "0.12.3", "0.15.3")
CELLS = [(version, i) for version in VERSIONS for i in range(len(CASES))]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    return {v: outcomes(2, CASES, tmp_path_factory.mktemp(v), version=v) for v in VERSIONS}


@pytest.mark.parametrize(("version", "number"), CELLS, ids=[f"{v}-{CASES[i].name}" for v, i in CELLS])
def test_a_clean_run_is_judged_in_full_and_passes(swept: dict[str, list[Outcome]], version: str, number: int) -> None:
    outcome = swept[version][number]
    assert outcome.exit is Exit.PASSED, outcome.trouble
    assert outcome.num_passed == outcome.num_tensors > 600
    assert outcome.num_inferred == 0
