"""Gradients that are zero but for rounding are judged by the size of their siblings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench._models import CUTS, NUM_TWINS, Cut, divide, train
from tests.support.traces import Case, TraceBuilder, draw_tensor, find_comparison, nudge
from ttrace.capture.plan import Plan
from ttrace.judge.check import check, judge_candidate
from ttrace.judge.reason import Reason
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.verdict import Exit, Judgement, Verdict, Weakness
from ttrace.trace.reader import Trace
from zoo.harness.gpt import HEADS, HIDDEN, Gpt

BIAS, WEIGHT = "0/-/attention.key.bias/param_grad", "0/-/attention.key.weight/param_grad"


def zero_case(folder: Path, wrong: float = 0.0, *, noise: float = 1e-7) -> Judgement:
    """A key's weight and bias; of the bias' gradient only noise is left, and in the candidate what is wrong."""
    case = Case(folder)
    case.add_right("0/0/attention/output")
    case.add(WEIGHT, draw_tensor(64, 64), "a/tp b")
    case.add("0/-/far.weight/param_grad", 1e6 * draw_tensor(64, 64), "a/tp b")
    case.reference.record_parts(BIAS, noise * draw_tensor(64, seed=1))
    case.twin.record_parts(BIAS, noise * draw_tensor(64, seed=2))
    case.candidate.record_parts(BIAS, noise * draw_tensor(64, seed=3) + wrong * draw_tensor(64, seed=4), "a/tp")
    return case.judge()


def test_noise_of_another_draw_passes(tmp_path: Path) -> None:
    judgement = zero_case(tmp_path)
    comparison = find_comparison(judgement, BIAS)
    assert comparison.verdict is Verdict.PASS
    assert comparison.tolerance is not None
    assert comparison.tolerance.size == pytest.approx(1.0, rel=0.05)  # the weight's, which is nearer than `far`
    assert comparison.tolerance.value == pytest.approx(4e-7, rel=1.0)
    assert judgement.exit is Exit.PASSED


@pytest.mark.parametrize("size", [1.0, 0.1, 1e-4])
def test_an_error_that_its_siblings_would_show_is_found(tmp_path: Path, size: float) -> None:
    judgement = zero_case(tmp_path, wrong=size)
    assert find_comparison(judgement, BIAS).verdict is Verdict.FAIL
    assert str(judgement.findings[0].comparison.id) == BIAS


def test_one_that_is_exactly_zero_in_the_reference_is_judged_too(tmp_path: Path) -> None:
    for wrong, exit_code in ((0.0, Exit.PASSED), (0.1, Exit.FOUND)):
        case = Case(tmp_path / str(exit_code))
        case.add_right("0/0/attention/output")
        case.add(WEIGHT, draw_tensor(64, 64), "a/tp b")
        case.reference.record_parts(BIAS, torch.zeros(64))
        case.twin.record_parts(BIAS, 1e-7 * draw_tensor(64))
        case.candidate.record_parts(BIAS, 1e-7 * draw_tensor(64, seed=1) + wrong, "a/tp")
        assert case.judge().exit is exit_code


def test_noise_that_is_as_large_as_the_siblings_is_no_proven_zero(tmp_path: Path) -> None:
    judgement = zero_case(tmp_path, noise=0.5)
    comparison = find_comparison(judgement, BIAS)
    assert (comparison.verdict, comparison.reason) == (Verdict.UNJUDGED, Reason.UNPROVEN_ZERO)
    assert judgement.exit is Exit.UNJUDGED


def twins_case(folder: Path, own: torch.Tensor, *twins: torch.Tensor, wrong: float = 1.5) -> Judgement:
    """A weight with a gradient and an update, both wrong in the candidate, and as many twins as given."""
    case = Case(folder)
    more = [TraceBuilder(folder / f"twin-{number}", role="twin") for number in range(2, len(twins) + 1)]
    builders = [case.twin, *more]

    def right(name: str, full: torch.Tensor) -> None:
        case.reference.record_parts(name, full)
        case.candidate.record_parts(name, full, "a b/tp")
        for number, twin in enumerate(builders):
            twin.record_parts(name, nudge(full, 1e-6, seed=number))

    right("0/0/attention/output", draw_tensor(64, 64))
    right("0/-/attention.query.weight/param_grad", draw_tensor(64, 64))
    before = draw_tensor(64, 64, seed=8)
    case.reference.record_parts(WEIGHT, own)
    case.candidate.record_parts(WEIGHT, wrong * own, "a b/tp")
    for builder, gradient in zip(builders, twins, strict=True):
        builder.record_parts(WEIGHT, gradient)
    for side, change in ((case.reference, 1.0), (case.candidate, wrong), *((twin, 1.0) for twin in builders)):
        layout = "a b/tp" if side is case.candidate else "..."
        side.record_parts("0/-/attention.key.weight/param", before, layout)
        side.record_parts("0/-/attention.key.weight/param_after", before - 1e-3 * change * own.sign(), layout)
    return check(case.reference.close(), [twin.close() for twin in builders], case.candidate.close())


def struck(full: torch.Tensor, value: float) -> torch.Tensor:
    """One element is another number, as after a flipped bit."""
    return full.index_put((torch.tensor([3]), torch.tensor([5])), torch.tensor(value))


@pytest.mark.parametrize("value", [1e38, 1e3, 50.0])
@pytest.mark.parametrize("num_twins", [1, 2, 3])
def test_a_twin_that_is_off_excuses_neither_a_gradient_nor_its_update(
    tmp_path: Path, value: float, num_twins: int
) -> None:
    own = draw_tensor(64, 64)
    twins = [nudge(own, 1e-6, seed=number) for number in range(num_twins)]
    assert twins_case(tmp_path / "sound", own, *twins).exit is Exit.FOUND
    judgement = twins_case(tmp_path / "off", own, *twins[:-1], struck(twins[-1], value))
    assert judgement.exit is not Exit.PASSED
    assert {c.reason for c in judgement.comparisons} & {Reason.ZERO, Reason.NOISE_DOMINATED_UPDATE} == set()


def test_a_reference_that_is_off_proves_no_zero_either(tmp_path: Path) -> None:
    own = draw_tensor(64, 64)
    twins = [nudge(own, 1e-6, seed=number) for number in range(3)]
    for number, damaged in enumerate((struck(own, 1e38), torch.zeros_like(own))):
        judgement = twins_case(tmp_path / str(number), damaged, *twins)
        assert judgement.exit is not Exit.PASSED
        assert {c.reason for c in judgement.comparisons} & {Reason.ZERO, Reason.NOISE_DOMINATED_UPDATE} == set()


def test_a_small_gradient_is_not_zero_because_one_twin_says_so(tmp_path: Path) -> None:
    """It is a hundredth of its siblings and known to a percent; a damaged twin makes it five times as large."""
    own = 1e-2 * draw_tensor(64, 64)
    twins = [nudge(own, 1e-2, seed=number) for number in range(3)]
    judgement = twins_case(tmp_path, own, *twins[:-1], twins[-1] + 5e-2 * draw_tensor(64, 64, seed=5))
    assert find_comparison(judgement, WEIGHT).reason is Reason.UNPROVEN_ZERO
    assert judgement.exit is not Exit.PASSED


def test_twins_that_agree_on_noise_prove_a_zero_and_excuse_its_update(tmp_path: Path) -> None:
    noise = [1e-7 * draw_tensor(64, 64, seed=number) for number in range(4)]
    judgement = twins_case(tmp_path, *noise, wrong=-1.0)
    assert find_comparison(judgement, WEIGHT).verdict is Verdict.PASS
    assert find_comparison(judgement, "0/-/attention.key.weight/update").reason is Reason.NOISE_DOMINATED_UPDATE
    assert judgement.exit is Exit.PASSED


def test_losing_all_of_it_goes_unseen_and_the_report_says_so(tmp_path: Path) -> None:
    case = Case(tmp_path, parameters={"attention.key.bias": True})
    case.add_right("0/0/attention/output")
    case.add(WEIGHT, draw_tensor(64, 64), "a/tp b")
    case.add(BIAS, 1e-7 * draw_tensor(64), "a/tp", lambda x: 0 * x, noise=1.0)
    judgement = case.judge()
    assert judgement.exit is Exit.PASSED
    assert judgement.reach is not None
    assert judgement.reach.weak == {"attention.key.bias": Weakness.NO_GRADIENT}


def test_replicas_of_noise_may_differ_by_noise(tmp_path: Path) -> None:
    for wrong, verdict in ((0.0, Verdict.PASS), (0.1, Verdict.CONFLICT)):
        case = Case(tmp_path / verdict)
        case.add(WEIGHT, draw_tensor(64, 64), "a/tp b")
        case.add_trusted(BIAS, 1e-7 * draw_tensor(64), noise=1.0)
        for rank in (0, 1):
            case.candidate.record(rank, BIAS, 1e-7 * draw_tensor(64, seed=rank) + rank * wrong, "a")
        assert find_comparison(case.judge(), BIAS).verdict is verdict


class Separate(nn.Module):
    """Attention whose key has a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (p(x).reshape(b, t, HEADS, -1).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(b, t, -1))
        return out


def separate_gpt(dtype: torch.dtype, cut: Cut | None = None) -> nn.Module:
    model = Gpt()
    for layer in model.layers:
        layer.attention = Separate()
    model = model.to(dtype)
    if cut is not None:
        divide(model, cut)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_models_key_biases_are_judged(tmp_path: Path, dtype: torch.dtype) -> None:
    plan = Plan(out=tmp_path / "reference", stop=False)
    train(plan, separate_gpt(dtype))
    known = {"reference": tmp_path / "reference"}
    for twin in range(1, NUM_TWINS + 1):
        update = {"out": tmp_path / f"twin-{twin}", "role": "twin", "twin": twin, **known}
        train(plan.model_copy(update=update), separate_gpt(dtype))
    twins = ToleranceModel.measure(
        Trace(plan.out), [Trace(tmp_path / f"twin-{twin}") for twin in range(1, NUM_TWINS + 1)]
    )

    def judge(name: str, cut: Cut, *, wrong: bool = False) -> Judgement:
        def change(model: nn.Module) -> None:
            attention = model.layers[1].attention  # type: ignore[union-attr, index]
            if wrong:  # the next bias' gradient went into this bucket
                attention.key.bias.grad.copy_(attention.query.bias.grad)

        out = tmp_path / name.replace(" ", "-")
        train(plan.model_copy(update={"out": out, "role": "candidate", **known}), separate_gpt(dtype, cut), change)
        return judge_candidate(twins, Trace(out))

    for name, cut in CUTS.items():
        judgement = judge(name, cut)
        biases = [c for c in judgement.comparisons if c.id.name.endswith("key.bias") and c.id.kind == "param_grad"]
        assert [c.verdict for c in biases] == [Verdict.PASS] * 3
        assert all(c.tolerance is not None and c.tolerance.size > 0 for c in biases)
        assert judgement.exit is Exit.PASSED
    found = judge("wrong", CUTS["tp=2"], wrong=True).findings
    assert str(found[0].comparison.id) == "0/-/layers.1.attention.key.bias/param_grad"
