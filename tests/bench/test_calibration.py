"""The benches of tolerances see what is clean and what is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench._models import CUTS, Bed, Model, bed
from bench.calibration import Tally
from bench.tolerances import FAULTS, FIXED, OURS, accusers, scaled
from ttrace.judge.check import checked


@pytest.fixture(scope="module")
def small() -> Iterator[Bed]:
    with bed(Model("llama", "bf16", 2)) as found:
        yield found


def test_a_candidate_that_computes_in_parts_differs_by_rounding(small: Bed) -> None:
    tally = Tally.of(checked(small.twins, small.candidate(CUTS["tp=2"])))
    assert tally.accused == []
    assert 0.0 < max(tally.ratios) < 4.0
    assert len(tally.ratios) > 100


def test_a_fixed_tolerance_accuses_the_clean_or_misses_the_wrong(small: Bed) -> None:
    clean = accusers(small, small.candidate(CUTS["tp=2"]))
    wrong = accusers(small, small.candidate(CUTS["tp=2"], scaled("layers.1.", 1.04)))
    assert OURS not in clean
    assert OURS in wrong
    assert all(name in clean or name not in wrong for name in FIXED)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(small: Bed, fault: str) -> None:
    assert OURS in accusers(small, small.candidate(CUTS["tp=2"], FAULTS[fault]))
