"""A twin that is far off in one tensor alone is a problem, and a tolerance names the rules that gave it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, TraceBuilder, draw_tensor, find_comparison, nudge
from ttrace.judge.check import check
from ttrace.judge.margin import MARGIN
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.tolerance.run_to_run import Noise
from ttrace.judge.tolerance.twins import TwinSample, estimate_tolerances, unit
from ttrace.judge.verdict import Exit, Judgement, Tolerance, ToleranceRule, ToleranceTerm
from ttrace.layouts.ids import TensorId

NAMES = ("0/0/mlp.fc1/output", "0/0/mlp.fc2/output", "0/0/mlp.fc2/grad_input", "0/0/other.fc1/grad_input")


def three_twins(
    folder: Path, *off: str, size: float = 1.0, noise: float = 1e-6, echo: float | None = None
) -> Judgement:
    """A right candidate; the second of three twins is off in some tensors: in the first by `size`, then by `echo`."""
    case = Case(folder)
    builders = [case.twin, *(TraceBuilder(folder / f"twin-{number}", role="twin") for number in (2, 3))]
    for name in NAMES:
        full = draw_tensor(16, 16, seed=len(name))
        case.reference.record_parts(name, full)
        case.candidate.record_parts(name, full, "a b/tp")
        for number, twin in enumerate(builders):
            own = size if echo is None or name == off[0] else echo
            twin.record_parts(name, nudge(full, own if number == 1 and name in off else noise, seed=number))
    return check(case.reference.close(), [twin.close() for twin in builders], case.candidate.close())


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_that_is_off_in_one_tensor_is_named(tmp_path: Path, name: str) -> None:
    judgement = three_twins(tmp_path, name)
    assert judgement.exit is Exit.UNJUDGED
    [problem] = judgement.problems
    assert problem.startswith(f"{tmp_path / 'twin-2'}: {name} is ")
    assert "damaged" in problem
    assert "Trace it again" in problem


def test_it_is_named_though_its_error_is_far_from_that_of_a_zero(tmp_path: Path) -> None:
    assert three_twins(tmp_path, NAMES[0], size=1e-2).exit is Exit.UNJUDGED


def test_twins_that_differ_by_a_factor_are_as_twins_are(tmp_path: Path) -> None:
    for number, (size, noise) in enumerate(((1e-4, 1e-6), (0.25, 1e-2), (1e-5, 0.0))):
        judgement = three_twins(tmp_path / str(number), NAMES[0], size=size, noise=noise)
        assert (judgement.exit, judgement.problems) == (Exit.PASSED, ())


def test_a_twin_that_crossed_a_kink_is_off_all_around_and_no_problem(tmp_path: Path) -> None:
    judgement = three_twins(tmp_path, NAMES[0], NAMES[1], size=1e-2, echo=1e-4)
    assert (judgement.exit, judgement.problems) == (Exit.PASSED, ())
    assert three_twins(tmp_path / "far", NAMES[0], NAMES[3], size=1e-2, echo=1e-4).exit is Exit.UNJUDGED


# A tolerance says which rule allowed how much.


ID = TensorId.parse("0/0/fc/output")


def terms(tolerance: Tolerance | None) -> dict[ToleranceRule, float]:
    assert tolerance is not None
    return {term.rule: term.value for term in tolerance.terms}


def estimate(numel: int, errors: tuple[float, ...], *floors: ToleranceTerm) -> Tolerance:
    return estimate_tolerances([TwinSample(ID, numel, torch.float32, errors, floors)])[ID]


@pytest.mark.parametrize(("error", "rule"), [(1e-3, ToleranceRule.TWINS), (1e-12, ToleranceRule.FLOOR)])
def test_the_largest_term_is_the_value(error: float, rule: ToleranceRule) -> None:
    tolerance = estimate(64, (error / 2, error))
    assert terms(tolerance) == {
        ToleranceRule.TWINS: MARGIN * error,
        ToleranceRule.FLOOR: MARGIN * unit(torch.float32),
    }
    assert tolerance.decisive == ToleranceTerm(rule, tolerance.value)


def test_small_tensors_are_pooled() -> None:
    other = TensorId.parse("0/0/head/output")
    samples = [TwinSample(ID, 4, torch.float32, (1e-5,)), TwinSample(other, 4, torch.float32, (1e-3,))]
    found = estimate_tolerances(samples)[ID]
    assert found.decisive == ToleranceTerm(ToleranceRule.POOLED, MARGIN * 1e-3)
    assert terms(found)[ToleranceRule.TWINS] == MARGIN * 1e-5


def test_a_floor_of_its_own_is_named() -> None:
    found = estimate(64, (1e-6,), ToleranceTerm(ToleranceRule.NORM, 1e-2))
    assert found.decisive == ToleranceTerm(ToleranceRule.NORM, MARGIN * 1e-2)
    assert found.value == MARGIN * 1e-2


def test_integers_have_no_terms() -> None:
    tolerance = estimate_tolerances([TwinSample(ID, 64, torch.int64, (0.0,))])[ID]
    assert tolerance.terms == ()
    assert tolerance.decisive is None


def test_a_checked_tensor_has_its_terms(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right(str(ID))
    tolerance = find_comparison(case.judge(), str(ID)).tolerance
    assert tolerance is not None
    assert {ToleranceRule.TWINS, ToleranceRule.FLOOR, ToleranceRule.SCALE} <= terms(tolerance).keys()
    assert terms(tolerance)[ToleranceRule.SCALE] == tolerance.scale
    assert tolerance.decisive is not None
    assert tolerance.decisive.value == tolerance.value


def test_noise_of_the_candidate_is_added(tmp_path: Path) -> None:
    full = draw_tensor(8, 12)
    case, again = Case(tmp_path / "first"), Case(tmp_path / "again")
    case.add(str(ID), full, "a b/tp", lambda x: x)
    again.add(str(ID), full, "a b/tp", lambda x: nudge(x, 1e-7))
    model = ToleranceModel.measure(case.reference.close(), [case.twin.close()])
    before = model.tolerances[ID]
    wider = Noise.between(case.candidate.close(), again.candidate.close(), model).widen(model).tolerances[ID]
    assert wider.value > before.value
    assert terms(wider)[ToleranceRule.NOISE] == pytest.approx(wider.value - before.value)
    assert wider.decisive == before.decisive
