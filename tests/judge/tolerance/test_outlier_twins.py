"""A twin that is far beyond the others in one tensor alone is a problem, not an excuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.traces import Case, TraceBuilder, draw_tensor, nudge
from ttrace.judge.check import check
from ttrace.judge.verdict import Exit, Judgement

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
