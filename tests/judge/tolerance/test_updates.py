"""Elements whose update rounding alone decides are left out, and no others."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from bench._models import CUTS, Model, bed
from tests.support.traces import Case, TraceBuilder, draw_tensor, find_comparison
from ttrace.judge.check import judge_candidate
from ttrace.judge.engine import Threads
from ttrace.judge.margin import MARGIN
from ttrace.judge.reason import Reason
from ttrace.judge.tolerance import model
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.tolerance.twins import unit
from ttrace.judge.tolerance.updates import allow_updated_weights, find_noise_dominated, measure_norm_error
from ttrace.judge.verdict import CauseName, Comparison, Exit, Tolerance, ToleranceRule, ToleranceTerm, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.layouts.region import Region

GRAD, AFTER = "0/-/fc.weight/param_grad", "0/-/fc.weight/param_after"
LR, NOISE = 1e-2, 1e-4
SMALL, LARGE = (2, 3), (5, 1)


def gradient() -> torch.Tensor:
    """Well away from zero, but for one element that is near it."""
    full = draw_tensor(8, 12)
    full = full.sign() * (full.abs() + 0.5)
    full[SMALL] = 1e-6
    return full


def after(signs: torch.Tensor) -> torch.Tensor:
    """A weight after one step of an optimizer that only looks at signs."""
    return draw_tensor(8, 12, seed=1) - LR * signs.sign()


def flipped(full: torch.Tensor, at: tuple[int, int]) -> torch.Tensor:
    full = full.clone()
    full[at] *= -1
    return full


def updated(case: Case, at: tuple[int, int]) -> Comparison:
    """The candidate's sign differs in one element of the gradient."""
    case.add_right("0/0/fc/output")
    case.add(GRAD, gradient(), "a b/tp", noise=NOISE)
    case.add(AFTER, after(gradient()), "a b/tp", lambda _: after(flipped(gradient(), at)), noise=0.0)
    return find_comparison(case.judge(), AFTER)


def test_a_flip_of_an_element_with_a_gradient_near_zero_does_not_fail(tmp_path: Path) -> None:
    assert updated(Case(tmp_path), SMALL).verdict is Verdict.PASS


def test_a_flip_of_an_element_with_a_large_gradient_fails(tmp_path: Path) -> None:
    assert updated(Case(tmp_path), LARGE).verdict is Verdict.FAIL


def test_noise_dominated_elements_are_left_out_of_the_next_steps_parameters_too(tmp_path: Path) -> None:
    case = Case(tmp_path)
    assert updated(case, SMALL).verdict is Verdict.PASS
    after_flip = after(flipped(gradient(), SMALL))
    case.add("1/-/fc.weight/param", after(gradient()), "a b/tp", lambda _: after_flip, noise=0.0)
    assert find_comparison(case.judge(), "1/-/fc.weight/param").verdict is Verdict.PASS


def test_nothing_is_left_out_of_parameters_before_the_first_step(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add("0/-/fc.weight/param", after(gradient()), "a b/tp", lambda x: flipped(x, SMALL), noise=0.0)
    case.add(GRAD, gradient(), "a b/tp", noise=NOISE)
    assert find_comparison(case.judge(), "0/-/fc.weight/param").verdict is Verdict.FAIL


def test_gradients_that_are_exactly_zero_everywhere_are_not_noise_dominated(tmp_path: Path) -> None:
    """Rows of an embedding whose token did not occur: their update is known."""
    case = Case(tmp_path)
    unused = gradient()
    unused[4:] = 0.0
    case.add(GRAD, unused, "a b/tp", noise=NOISE)
    case.add(AFTER, after(unused), "a b/tp", lambda x: torch.cat([x[:4], 2 * x[4:]]), noise=0.0)
    assert find_comparison(case.judge(), AFTER).verdict is Verdict.FAIL


def test_zeros_that_only_the_reference_has_are_noise_dominated(tmp_path: Path) -> None:
    case = Case(tmp_path)
    lucky = gradient()
    lucky[SMALL] = 0.0
    case.reference.record_parts(GRAD, lucky)
    case.twin.record_parts(GRAD, gradient())
    mask = find_noise_dominated(
        case.reference.close(), [case.twin.close()], TensorId.parse(AFTER), {TensorId.parse(GRAD): 1e-3}
    )
    assert mask is not None
    assert mask(Region.whole(tuple(lucky.shape))).nonzero().tolist() == [list(SMALL)]
    assert not mask.is_everything()


def test_gradients_may_be_sharded_in_another_way_than_the_parameter(tmp_path: Path) -> None:
    trusted = TraceBuilder(tmp_path / "reference", "dp=2", "reference")
    trusted.record_parts(GRAD, gradient(), "a/dp b")
    trusted.record_parts(AFTER, after(gradient()), "a b")
    noise = {TensorId.parse(GRAD): 1e-3}
    mask = find_noise_dominated(trusted.close(), [], TensorId.parse(AFTER), noise)
    assert mask is not None
    assert mask(Region.whole(tuple(gradient().shape))).nonzero().tolist() == [list(SMALL)]


def test_an_update_that_rounding_decides_altogether_is_not_called_right(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/input", "0/0/fc/output", "0/0/fc/grad_output")
    case.add(GRAD, 1e-9 * gradient(), "a b/tp", lambda x: -x, noise=2.0)
    case.add(AFTER, after(gradient()), "a b/tp", lambda _: after(-gradient()), noise=0.0)
    judgement = case.judge()
    comparison = find_comparison(judgement, AFTER)
    assert (comparison.verdict, comparison.reason) == (Verdict.UNJUDGED, Reason.NOISE_DOMINATED_UPDATE)
    assert judgement.exit is Exit.PASSED


def test_an_update_is_not_excused_by_a_gradient_that_is_not_proven_zero(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/input", "0/0/fc/output", "0/0/fc/grad_output")
    case.add(GRAD, gradient(), "a b/tp", lambda x: -x, noise=2.0)
    case.add(AFTER, after(gradient()), "a b/tp", lambda _: after(-gradient()), noise=0.0)
    judgement = case.judge()
    assert find_comparison(judgement, AFTER).reason is Reason.UNPROVEN_UPDATE
    assert judgement.exit is Exit.UNJUDGED


@pytest.mark.parametrize("at", [SMALL, LARGE])
def test_replicas_must_agree_in_noise_dominated_elements_too(tmp_path: Path, at: tuple[int, int]) -> None:
    case = Case(tmp_path)
    case.add(GRAD, gradient(), noise=NOISE)
    case.add_trusted(AFTER, after(gradient()), noise=0.0)
    for rank in range(2):
        case.candidate.record(rank, AFTER, after(flipped(gradient(), at) if rank else gradient()), "a b")
    assert find_comparison(case.judge(), AFTER).verdict is Verdict.CONFLICT


def test_an_element_whose_gradient_is_as_small_as_adams_epsilon_is_no_fault() -> None:
    """There an update goes with its gradient: one element was the whole error of a weight, 1.25 x its tolerance."""
    with bed(Model("gpt", "fp32", 3)) as found:
        judgement = judge_candidate(found.twins, found.candidate(CUTS["tp=2"]))
    assert judgement.exit is Exit.PASSED


def test_an_update_may_differ_by_one_rounding_of_the_largest_weight(tmp_path: Path) -> None:
    """A small update of a large weight has few bits, and all twins may round them alike."""
    before = draw_tensor(8, 12)
    weight = before - 1e-4 * draw_tensor(8, 12, seed=1)
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    case.add("0/-/fc.weight/param", before, "a b/tp", noise=0.0)
    case.add(AFTER, weight, "a b/tp", noise=0.0)
    rounding = 2 * unit(torch.float32) * float(weight.abs().max())
    norm = float((weight.double() - before.double()).norm())
    tolerance = find_comparison(case.judge(), "0/-/fc.weight/update").tolerance
    assert tolerance is not None
    assert tolerance.decisive is not None
    assert tolerance.decisive.rule is ToleranceRule.UPDATE
    assert tolerance.value == pytest.approx(MARGIN * rounding / norm)
    assert tolerance.twin_error == 0.0


def test_in_later_steps_a_module_is_allowed_the_error_of_its_weights() -> None:
    own = (ToleranceTerm(ToleranceRule.TWINS, 1e-6),)
    swayed = Tolerance(1e-4, 1e-6, 0.0, terms=(*own, ToleranceTerm(ToleranceRule.UPDATE, 1e-4)))
    plain = Tolerance(1e-6, 2.5e-7, 0.0, terms=own)
    ids = {
        "1/-/mlp.fc.weight/param": swayed,
        "0/-/mlp.fc.weight/param_after": swayed,
        "1/0/mlp.fc/output": plain,
        "1/0/mlp.fc/grad_input": plain,
        "1/0/mlp/output": plain,
        "1/0/mlp.fc/input": plain,
        "1/0/other/output": plain,
        "0/0/mlp.fc/output": plain,
    }
    found = allow_updated_weights({TensorId.parse(text): tolerance for text, tolerance in ids.items()})
    widened = {str(tensor_id) for tensor_id, tolerance in found.items() if tolerance.value == 1e-4}
    assert widened - {"1/-/mlp.fc.weight/param", "0/-/mlp.fc.weight/param_after"} == {
        "1/0/mlp.fc/output",
        "1/0/mlp.fc/grad_input",
        "1/0/mlp/output",
    }


def test_a_parameter_has_the_tolerance_that_it_had_after_the_step_before(tmp_path: Path) -> None:
    """An element that Adam moves by a share only, as its gradient is near Adam's epsilon, may be in no twin."""
    case, before = Case(tmp_path), "0/-/fc.weight/param"
    case.add_right("0/0/fc/output")
    case.add_right("1/0/fc/output")
    grad = gradient()
    grad[SMALL] = 3e-3
    update = grad.sign()
    update[SMALL] = 0.5
    values = draw_tensor(8, 12, seed=1)
    case.add(GRAD, grad, "a b/tp", noise=NOISE)
    case.add(before, values, "a b/tp", noise=0.0)
    for tensor_id in (AFTER, "1/-/fc.weight/param"):
        case.add(tensor_id, values - LR * update, "a b/tp", noise=0.0)
    judgement = case.judge()
    terms = []
    for tensor_id in (AFTER, "1/-/fc.weight/param"):
        tolerance = find_comparison(judgement, tensor_id).tolerance
        assert tolerance is not None
        terms.append(next(term.value for term in tolerance.terms if term.rule is ToleranceRule.UPDATE))
    assert terms[0] == pytest.approx(terms[1])
    assert terms[0] > 0


# The gradients' norm: an origin only where every gradient is right, and only as exact as a long sum can be.


def judged_modules(tmp_path: Path, *, wrong_gradient: bool) -> list[str]:
    case = Case(tmp_path, "tp=2")
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b/tp")
    case.add("0/-/fc.weight/param", draw_tensor(4, 8, seed=1), "a b/tp")
    change = (lambda x: x + draw_tensor(4, 8, seed=9)) if wrong_gradient else None
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 8, seed=2), "a b/tp", change)
    case.add("0/-/./grad_norm", torch.tensor(3.0), "", lambda x: x * 1.5)
    case.add("0/-/./clip", torch.tensor(0.5), "", lambda x: x / 1.5)
    case.add("0/-/fc.weight/param_after", draw_tensor(4, 8, seed=3), "a b/tp", lambda x: x * 1.1)
    return [str(finding.comparison.id.site) for finding in case.judge().findings]


def test_a_wrong_norm_over_right_gradients_is_the_finding(tmp_path: Path) -> None:
    assert judged_modules(tmp_path, wrong_gradient=False) == ["./grad_norm"]


def test_a_wrong_gradient_is_the_finding_and_not_the_norm_made_from_it(tmp_path: Path) -> None:
    assert judged_modules(tmp_path, wrong_gradient=True) == ["fc.weight/param_grad"]


def test_a_norm_of_each_ranks_own_gradients_names_the_axis(tmp_path: Path) -> None:
    case = Case(tmp_path, "pp=2")
    case.add("0/0/fc/output", draw_tensor(4, 8))
    case.add_trusted("0/-/./grad_norm", torch.tensor(5.0))
    for rank, share in enumerate((3.0, 4.0)):
        case.candidate.record(rank, "0/-/./grad_norm", torch.tensor(share), "")
    cause = case.judge().findings[0].cause
    assert (cause.name, cause.axis) == (CauseName.GRADIENT_NORM, "pp")
    assert cause.sentence.endswith("each rank has the norm of its own: not combined over pp")


def test_norms_that_differ_otherwise_name_no_axis(tmp_path: Path) -> None:
    case = Case(tmp_path, "pp=2")
    case.add("0/0/fc/output", draw_tensor(4, 8))
    case.add_trusted("0/-/./grad_norm", torch.tensor(5.0))
    for rank, share in enumerate((3.0, 3.5)):
        case.candidate.record(rank, "0/-/./grad_norm", torch.tensor(share), "")
    assert case.judge().findings[0].cause.axis is None


def test_norms_of_many_numbers_are_off() -> None:
    """By more than u, however the parts are summed, and a sum in parts is off by less: the tolerance knows."""
    gradient = draw_tensor(1 << 22)
    exact = float(gradient.double().norm())
    whole, halves = gradient.norm(), torch.stack([half.norm() for half in gradient.chunk(2)]).norm()
    error = measure_norm_error(float(whole), exact**2, gradient.numel())
    assert abs(float(whole) - exact) / exact <= error
    assert abs(float(whole - halves)) / exact <= error
    assert error < 1e-3


@pytest.mark.parametrize("share", [0.5, 0.99, 1.01, 2.0])
def test_another_norm_is_no_rounding(share: float) -> None:
    """Clipping may leave parameters out, or take the largest element."""
    numel = 10**6
    assert measure_norm_error(share * 3.0, 9.0, numel) == measure_norm_error(3.0, 9.0, numel) < 1e-6


def test_what_cannot_be_measured_is_no_rounding() -> None:
    numel = 10**6
    for norm, squares in ((float("inf"), 9.0), (3.0, float("nan")), (3.0, 0.0)):
        assert measure_norm_error(norm, squares, numel) == measure_norm_error(3.0, 9.0, numel)


def clipped(tmp_path: Path, off: float) -> dict[str, str]:
    """The verdicts on a candidate whose norm is right, where the reference's is off by 1e-5."""
    case = Case(tmp_path, "tp=2")
    gradient, moved = draw_tensor(512, 4096, seed=2), draw_tensor(512, 4096, seed=3)
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b/tp")
    case.add("0/-/fc.weight/param_grad", gradient, "a b/tp")
    norm = float(gradient.double().norm()) * (1 + 1e-5)
    case.add("0/-/./grad_norm", torch.tensor(norm), "", lambda x: x * (1 + off), noise=0.0)
    case.add("0/-/./clip", torch.tensor(1 / norm), "", lambda x: x / (1 + off), noise=0.0)
    case.add("0/-/fc.weight/optim.exp_avg_sq", moved.square(), "a b/tp", lambda x: x / (1 + off) ** 2, noise=1e-7)
    case.add("0/-/fc.weight/optim.main_param", moved, "a b/tp", lambda x: x * (1 + off), noise=1e-7)
    return {str(comparison.id): str(comparison.verdict) for comparison in case.judge().comparisons}


def test_clipping_by_a_norm_that_is_off_is_rounding(tmp_path: Path) -> None:
    verdicts = clipped(tmp_path, -1e-5)
    assert verdicts.pop("0/-/fc.weight/optim.main_param") == "FAIL"  # a parameter is not clipped
    assert set(verdicts.values()) == {"PASS"}


def test_clipping_by_another_norm_is_not(tmp_path: Path) -> None:
    verdicts = clipped(tmp_path, 1e-4)
    assert {verdicts[f"0/-/{name}"] for name in ("./grad_norm", "./clip", "fc.weight/optim.exp_avg_sq")} == {"FAIL"}


def test_no_worker_reads_the_stats_that_are_still_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict that grows while another thread iterates over it ended a run with exit 2."""
    callers: list[threading.Thread] = []

    def measure_here(norm: float, squares: float, numel: int) -> float:
        callers.append(threading.current_thread())
        return measure_norm_error(norm, squares, numel)

    monkeypatch.setattr(model, "measure_norm_error", measure_here)
    case = Case(tmp_path)
    case.add_trusted("0/-/fc.weight/param_grad", draw_tensor(4, 8))
    case.add_trusted("0/-/./grad_norm", torch.tensor(3.0))
    case.add_trusted("0/0/fc/output", draw_tensor(64, 64))  # the others are worth a thread
    ToleranceModel.measure(case.reference.close(), [case.twin.close()], engine=Threads(2))
    assert callers == [threading.main_thread()]
