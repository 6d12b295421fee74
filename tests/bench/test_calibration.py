"""The benches of tolerances see what is clean and what is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench._models import CUTS, Bed, Model, bed
from bench.calibration import TITLES, Tally, curve, estimates, faults_by_layer, ratio_of
from bench.tolerances import FAULTS, OURS, accusing, scaled
from ttrace.judge.check import judge_candidate
from ttrace.judge.margin import MARGIN
from ttrace.judge.verdict import Comparison, Judgement, Tolerance, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.values.stats import Stats
from zoo.fixed import FIXED


@pytest.fixture(scope="module")
def small() -> Iterator[Bed]:
    with bed(Model("llama", "bf16", 2)) as found:
        yield found


def test_a_candidate_that_computes_in_parts_differs_by_rounding(small: Bed) -> None:
    tally = Tally.of(judge_candidate(small.twins, small.candidate(CUTS["tp=2"])))
    assert tally.accused == []
    assert 0.0 < max(tally.ratios) < 4.0
    assert len(tally.ratios) > 100


def test_a_fixed_tolerance_accuses_the_clean_or_misses_the_wrong(small: Bed) -> None:
    clean = accusing(small, small.candidate(CUTS["tp=2"]))
    wrong = accusing(small, small.candidate(CUTS["tp=2"], scaled("layers.1.", 1.04)))
    assert OURS not in clean
    assert OURS in wrong
    assert all(name in clean or name not in wrong for name in FIXED)


def test_a_choice_that_differs_has_no_ratio() -> None:
    """Two tokens that are a tie may be chosen either way: an integer's tolerance is zero."""
    chosen = Stats(count=4, aa=4.0, bb=5.0, dd=1.0, ab=4.0)
    comparison = Comparison(TensorId.parse("0/0/router/decision"), Verdict.PASS, None, chosen, Tolerance(0.0, 0.0, 0.0))
    assert ratio_of(comparison) is None
    assert "| 0 | 0 | 0.00 |" in Tally.of(Judgement((comparison,), (), ())).row("tie")


def test_curves_have_a_point_for_every_layer(small: Bed) -> None:
    for kind in TITLES:
        found = curve(estimates(small.twins.tolerances), kind).errors
        assert len(found) == small.model.num_layers
        assert all(error > 0.1 for error in found)


def test_faults_stand_out_from_rounding(small: Bed) -> None:
    for curves in faults_by_layer(small).values():
        fault, observed, estimated = (curves[name].errors for name in curves)
        assert fault[0] > MARGIN * estimated[0] > 0
        assert 0 < observed[0] < MARGIN * estimated[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(small: Bed, fault: str) -> None:
    assert OURS in accusing(small, small.candidate(CUTS["tp=2"], FAULTS[fault]))
