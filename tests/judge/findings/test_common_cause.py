"""All gradients that are wrong for one cause are one finding."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.traces import Case, draw_tensor
from ttrace.judge.findings.isolated import combine
from ttrace.judge.verdict import CauseName

NAMES = tuple(f"layers.{i}.fc" for i in range(4))


def gradients(folder: Path, *factors: float) -> Case:
    """Outputs and activation gradients that are right, and a gradient for each factor."""
    case = Case(folder, "dp=2")
    for i, name in enumerate(NAMES):
        for kind in ("input", "output", "grad_output"):
            case.add(f"0/0/{name}/{kind}", draw_tensor(4, 8, seed=i))
    for i, factor in enumerate(factors):
        name, full = f"0/-/{NAMES[i]}.weight/param_grad", draw_tensor(4, 8, seed=20 + i)
        case.add_trusted(name, full)
        case.candidate.record_parts(name, factor * full)
    return case


def test_one_factor_on_all_gradients_is_one_finding(tmp_path: Path) -> None:
    [finding] = gradients(tmp_path, 2.0, 2.0, 2.0, 2.0).judge().findings
    words = "in all 4 parameter gradients the candidate is 2 x the reference: scaled by dp (dp=2)"
    assert finding.cause.sentence.startswith(words)
    assert (finding.cause.name, finding.cause.axis) == (CauseName.DOUBLE_REDUCTION, "dp")
    assert str(finding.comparison.id) == "0/-/layers.0.fc.weight/param_grad"
    assert finding.source == ""  # no module's own fault
    assert len(finding.covers) == 3


def test_a_gradient_that_is_right_or_has_another_factor_keeps_them_apart(tmp_path: Path) -> None:
    assert len(gradients(tmp_path / "right", 2.0, 2.0, 2.0, 1.0).judge().findings) == 3
    assert len(gradients(tmp_path / "other", 0.3, 0.3, 0.3, 0.7).judge().findings) == 4


def test_gradients_that_nothing_explains_are_one_finding_too(tmp_path: Path) -> None:
    case = gradients(tmp_path)
    for i, name in enumerate(NAMES):
        case.add(
            f"0/-/{name}.weight/param_grad", draw_tensor(4, 8, seed=i), change=lambda x: x + draw_tensor(4, 8, seed=77)
        )
    [finding] = case.judge().findings
    words = "all 4 parameter gradients are wrong, and no known pattern explains the difference"
    assert finding.cause.sentence == words
    assert finding.cause.evidence[-1].startswith("activation gradients are right")


def test_gradients_after_something_wrong_are_left_as_they_are(tmp_path: Path) -> None:
    case = gradients(tmp_path, 2.0, 2.0)
    case.add_wrong("0/0/head/output")
    assert len(case.judge().findings) == 3


def test_isolation_does_not_bring_them_back(tmp_path: Path) -> None:
    ordinary = gradients(tmp_path / "a", 2.0, 2.0, 2.0, 2.0).judge()
    alone = gradients(tmp_path / "b", 2.0, 2.0, 2.0, 1.0).judge()
    assert len(alone.findings) == 3
    [finding] = combine(ordinary, alone).findings
    assert finding.alone


def test_a_zero_gradient_does_not_speak(tmp_path: Path) -> None:
    case = gradients(tmp_path, 2.0, 2.0)
    case.add("0/-/layers.2.fc.weight/param_grad", torch.zeros(4, 8))
    assert len(case.judge().findings) == 1
