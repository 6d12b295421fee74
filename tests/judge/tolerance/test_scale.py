"""Mis-scaling below rounding noise is found: in one tensor by its scale, in many by all of them together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from bench._models import CUTS, Bed, Model, bed
from tests.support.traces import Case, TraceBuilder, draw_tensor, nudge
from ttrace.judge.check import check, judge_candidate
from ttrace.judge.findings import global_scale
from ttrace.judge.reason import Reason
from ttrace.judge.tolerance import scale
from ttrace.judge.verdict import CauseName, Exit, Judgement, Tolerance, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.values.stats import Stats

NOISE = 0.01


def judge(
    folder: Path, factor: float, *, kind: str = "grad_input", num: int = 12, only: int | None = None
) -> Judgement:
    """Tensors that rounding moves by 1%, mis-scaled by a factor besides: all of them, or only one."""
    case = Case(folder, noise=NOISE)
    for i in range(num):
        name, full = f"0/0/m{i}/{kind}", draw_tensor(32, 32, seed=i)
        case.add_trusted(name, full)
        case.candidate.record_parts(
            name, nudge(full, NOISE, seed=i + 7) * (factor if only in (None, i) else 1.0), "a b/tp"
        )
    case.add_right("0/0/fc/output")
    return case.judge()


def test_a_twin_that_lacks_tensors_says_nothing_of_them(tmp_path: Path) -> None:
    """One twin has no gradients of parameters, and no twin has one of the outputs."""
    case = Case(tmp_path, noise=NOISE)
    short = TraceBuilder(tmp_path / "twin-2", role="twin")
    for kind in ("grad_input", "param_grad"):
        for i in range(12):
            name, full = f"0/{'-' if kind == 'param_grad' else 0}/m{i}/{kind}", draw_tensor(32, 32, seed=i)
            case.add(name, full, "a b/tp", lambda x: nudge(x, NOISE, seed=7))
            if kind == "grad_input":
                short.record_parts(name, nudge(full, NOISE, seed=5))
    case.add_right("0/0/fc/output")
    case.reference.record_parts("0/0/last/output", draw_tensor(4, 8))
    case.candidate.record_parts("0/0/last/output", nudge(draw_tensor(4, 8), 1e-6), "a b/tp")
    judgement = check(case.reference.close(), [case.twin.close(), short.close()], case.candidate.close())
    assert judgement.findings == ()
    assert judgement.exit is Exit.UNJUDGED
    assert [str(c.id) for c in judgement.comparisons if c.reason is Reason.NO_TWIN] == ["0/0/last/output"]
    assert judgement.count(Verdict.PASS) == len(judgement.comparisons) - 1


def test_rounding_alone_is_no_finding(tmp_path: Path) -> None:
    assert judge(tmp_path, 1.0).exit is Exit.PASSED


def test_one_tensor_is_mis_scaled_although_its_error_is_within_the_tolerance(tmp_path: Path) -> None:
    judgement = judge(tmp_path, 1.02, only=3)
    (finding,) = judgement.findings
    assert (str(finding.comparison.id), finding.cause.name) == ("0/0/m3/grad_input", CauseName.MIS_SCALED)
    assert finding.comparison.error < finding.comparison.tolerance.value  # type: ignore[union-attr]
    assert finding.comparison.excess > 1.0
    assert "1.019" in finding.cause.sentence


def test_many_tensors_are_mis_scaled_together_although_none_is_alone(tmp_path: Path) -> None:
    judgement = judge(tmp_path, 0.999)
    assert judgement.count(Verdict.FAIL) == 0
    (finding,) = judgement.findings
    assert (finding.module, finding.cause.name) == (".", CauseName.MIS_SCALED)
    assert finding.cause.sentence.startswith("all 12 gradients of inputs together are 0.99")
    assert judgement.exit is Exit.FOUND


def test_many_that_are_alike_are_one_finding_although_some_show_it_alone(tmp_path: Path) -> None:
    judgement = judge(tmp_path, 1.02)
    assert judgement.count(Verdict.FAIL) > 1
    (finding,) = judgement.findings
    assert finding.cause.sentence.startswith("all 12 gradients of inputs together are 1.019")


def test_few_tensors_do_not_speak_together(tmp_path: Path) -> None:
    assert judge(tmp_path, 0.999, num=global_scale.MANY - 1).exit is Exit.PASSED


@pytest.mark.parametrize("kind", ["update", "optim.exp_avg", "buffer"])
def test_what_knows_little_of_its_scale_is_not_judged_by_it(tmp_path: Path, kind: str) -> None:
    assert judge(tmp_path, 1.02, kind=kind).exit is Exit.PASSED


def test_a_wider_margin_is_wider_for_scales_too(tmp_path: Path) -> None:
    case = Case(tmp_path, noise=NOISE)
    case.add("0/0/a/output", draw_tensor(64, 64), "a b/tp", lambda x: x * 1.01)
    assert case.judge().exit is Exit.FOUND
    assert case.judge(margin=400).exit is Exit.PASSED


@pytest.fixture(scope="module", params=["gpt", "moe"])
def small(request: pytest.FixtureRequest) -> Iterator[Bed]:
    """A reference in bf16 and its twins."""
    with bed(Model(request.param, "bf16", 3)) as found:
        yield found


def scaled_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.995)


@pytest.mark.parametrize("cut", CUTS)
def test_clean_training_in_bf16_passes(small: Bed, cut: str) -> None:
    assert judge_candidate(small.twins, small.candidate(CUTS[cut])).exit is Exit.PASSED


def test_gradients_mis_scaled_by_half_a_percent_in_bf16_are_found(small: Bed) -> None:
    judgement = judge_candidate(small.twins, small.candidate(CUTS["tp=2"], scaled_gradients))
    (finding,) = judgement.findings
    assert (finding.module, finding.comparison.id.kind, finding.cause.name) == (".", "param_grad", CauseName.MIS_SCALED)


def test_a_backward_mis_scaled_by_half_a_percent_in_bf16_is_found(small: Bed) -> None:
    judgement = judge_candidate(small.twins, small.candidate(CUTS["tp=2"], backward=0.995))
    assert [finding.cause.name for finding in judgement.findings] == [CauseName.MIS_SCALED]
    assert judgement.findings[0].comparison.id.kind == "grad_output"


def test_a_place_that_strays_is_known() -> None:
    """A layer whose own twins happen to show nothing is told by the same module's twins in other layers."""
    tolerances, twins = {}, {}
    for layer in range(48):
        for module, strays in (("a", False), ("b", layer % 16 == 1)):
            tensor_id = TensorId.parse(f"0/0/layers.{layer}.{module}/output")
            off = 4e-3 if strays else 1e-4
            tolerances[tensor_id] = Tolerance(0.04, 0.01, 1e-7)
            twins[tensor_id] = [Stats(count=1024, aa=1.0, bb=1.0, ab=1.0 + off, dd=1e-4)]
    found = scale.add_scale(tolerances, twins)
    calm, straying = (found[TensorId.parse(f"0/0/layers.0.{module}/output")].scale for module in "ab")
    assert straying == pytest.approx(scale.SCALE_MARGIN * 4e-3 / 3)
    assert calm < straying / 1.5
