"""Unmodified megatron-core under all that it can combine: every tensor has a layout, and nothing is accused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.megatron_cases import BF16, FP16, gpt, llama, mla, moe
from ttrace.judge.reason import Reason, Why, describe
from ttrace.judge.verdict import Exit
from zoo.harness.megatron.case import Case
from zoo.harness.megatron.traced import References, outcomes
from zoo.harness.results import Outcome

pytestmark = [pytest.mark.megatron, pytest.mark.slow]


CASES: dict[int, list[Case]] = {
    2: [
        gpt(),
        gpt(overlap_grads=True),
        gpt(dtype=BF16),
        gpt(dtype=FP16),
        gpt(recompute="full"),
        gpt(recompute="selective", dtype=BF16),
        gpt(tp=2),
        gpt(tp=2, dtype=BF16),
        gpt(tp=2, recompute="full"),
        gpt(tp=2, sp=True),
        gpt(tp=2, sp=True, dtype=BF16),
        gpt(tp=2, sp=True, dtype=FP16),
        gpt(tp=2, sp=True, recompute="selective"),
        gpt(tp=2, sp=True, recompute="full", dtype=BF16),
        gpt(tp=2, sp=True, per_token=True, masked=True),
        gpt(pp=2),
        gpt(pp=2, dtype=BF16),
        gpt(pp=2, tied=False, deallocate=True),
        gpt(pp=2, vpp=2),
        gpt(pp=2, vpp=2, recompute="full"),
        gpt(zero=True),
        gpt(zero=True, dtype=BF16),
        gpt(zero=True, overlap_grads=True, overlap_params=True),
        gpt(zero=True, overlap_grads=True, overlap_params=True, dtype=BF16),
        gpt(cp=2),
        gpt(cp=2, dtype=BF16),
        gpt(cp=2, per_token=True, masked=True),
        llama(),
        llama(tp=2),
        llama(tp=2, sp=True),
        llama(tp=2, sp=True, dtype=BF16),
        llama(pp=2, deallocate=True),
        llama(cp=2),
        mla(),
        mla(pp=2),
        moe(),
        moe(tp=2, sp=True),
        moe(tp=2, sp=True, swiglu=True, shared_expert=True),
        moe(tp=2, sp=True, ep=2, etp=1),
        moe(ep=2),
        moe(ep=2, dispatcher="allgather"),
        moe(ep=2, dtype=BF16),
        moe(ep=2, zero=True),
        moe(ep=2, grouped=True, dtype=BF16),
        moe(tp=2, sp=True, swiglu=True, grouped=True, dtype=BF16),
        moe(ep=2, recompute="full"),
        moe(pp=2),
    ],
    4: [
        gpt(tp=2, pp=2),
        gpt(tp=2, sp=True, pp=2, vpp=2),
        gpt(tp=2, cp=2, sp=True),
        gpt(tp=2, zero=True, dtype=BF16),
        gpt(tp=4, sp=True, recompute="full", dtype=BF16),
        gpt(pp=2, cp=2),
        gpt(pp=4),
        gpt(pp=2, zero=True, overlap_grads=True, overlap_params=True),
        gpt(cp=2, zero=True),
        llama(tp=2, sp=True, pp=2, zero=True, dtype=BF16),
        llama(cp=2, pp=2, deallocate=True),
        llama(tp=2, sp=True, recompute="selective"),
        moe(ep=4),
        moe(pp=2, ep=2),
        moe(cp=2, ep=2),
        moe(tp=2, sp=True, ep=2),
        moe(tp=2, sp=True, ep=4, etp=1, shared_expert=True),
        moe(ep=2, zero=True, dtype=BF16),
        mla(pp=2, zero=True),
    ],
    8: [
        gpt(tp=2, sp=True, pp=2, cp=2, zero=True),
        llama(tp=2, sp=True, pp=2, vpp=2, dtype=BF16),
        moe(tp=2, sp=True, pp=2, ep=2),
        moe(cp=2, ep=4),
    ],
}
"""By number of ranks. What they leave over is data parallel."""


def is_in_ci(num_ranks: int, case: Case) -> bool:
    """Whether it is one of every sixth."""
    return CASES[num_ranks].index(case) % 6 == 0


CELLS = [
    pytest.param(
        (num_ranks, case),
        marks=[] if is_in_ci(num_ranks, case) else pytest.mark.nightly,
        id=f"{num_ranks}-{case.name}",
    )
    for num_ranks, cases in CASES.items()
    for case in cases
]


@pytest.fixture(scope="module")
def swept(
    selected: Callable[[str], list[tuple[int, Case]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, Case], Outcome]:
    known: References = {}
    found: dict[tuple[int, Case], Outcome] = {}
    chosen = selected("cell")
    for num_ranks in sorted({num_ranks for num_ranks, _ in chosen}):
        cases = [case for case in CASES[num_ranks] if (num_ranks, case) in chosen]
        ran = outcomes(num_ranks, cases, tmp_path_factory.mktemp(f"ranks-{num_ranks}"), known=known)
        found |= {(num_ranks, case): outcome for case, outcome in zip(cases, ran, strict=True)}
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_a_clean_run_is_judged_in_full_and_passes(
    swept: dict[tuple[int, Case], Outcome], cell: tuple[int, Case]
) -> None:
    outcome = swept[cell]
    assert outcome.exit is Exit.PASSED, outcome.trouble
    assert not outcome.trouble
    assert outcome.num_inferred == 0
    assert outcome.num_tensors > 900
    reduces_early = cell[1].overlap_grads
    assert set(outcome.unjudged) <= ({describe(Why(Reason.UNTRACED_IN_CANDIDATE))} if reduces_early else set())


def test_the_sweep_is_wide() -> None:
    assert sum(map(len, CASES.values())) >= 60
    assert all(len(set(cases)) == len(cases) for cases in CASES.values())
