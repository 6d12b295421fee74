"""Isolation tells faults apart that the ordinary run shows as one, and puts them where they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.traces import Case
from ttrace.capture.plan import Plan
from ttrace.judge.findings.isolated import combine
from ttrace.judge.verdict import Exit, Judgement
from zoo.harness.gpt import Attention, Gpt
from zoo.harness.runs import NUM_TWINS, SimulatedRank, judge, trace_reference, train


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary and an isolated reference with their twins."""
    folder = tmp_path_factory.mktemp("isolated")
    torch.manual_seed(0)
    trace_reference(folder, Gpt, {})
    alone = Plan(out=folder / "isolated" / "reference", reference=folder / "reference", isolated=True, stop=False)
    train(alone, Gpt(), SimulatedRank(), {})
    for twin in range(1, NUM_TWINS + 1):
        update = {"out": alone.out.parent / f"twin-{twin}", "role": "twin", "twin": twin, "reference": alone.out}
        train(alone.model_copy(update=update), Gpt(), SimulatedRank(), {})
    return folder


def result(references: Path, out: Path, spoil: Callable[[Gpt], None]) -> Judgement:
    found = []
    for isolated, folder in ((False, references), (True, references / "isolated")):
        model = Gpt()
        spoil(model)
        trace = out / str(isolated)
        plan = Plan(out=trace, role="candidate", reference=folder / "reference", isolated=isolated, stop=False)
        train(plan, model, SimulatedRank(), {})
        found.append(judge(folder, trace))
    return combine(*found)


def scaled(module: nn.Module, factor: float = 1.1) -> None:
    forward = module.forward
    module.forward = lambda *args: forward(*args) * factor


def test_two_faults_are_two_findings(references: Path, tmp_path: Path) -> None:
    def spoil(model: Gpt) -> None:
        scaled(model.layers[0].mlp.fc1)  # type: ignore[union-attr,arg-type]
        scaled(model.layers[2].attention.proj)  # type: ignore[union-attr,arg-type]

    judgement = result(references, tmp_path, spoil)
    assert [finding.module for finding in judgement.findings] == ["layers.0.mlp.fc1", "layers.2.attention.proj"]
    assert all(finding.alone for finding in judgement.findings)


def test_a_fault_between_modules_is_the_module_arounds(references: Path, tmp_path: Path) -> None:
    class Uncausal(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            q, k, v = (p.reshape(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v)
            out: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(b, t, -1))
            return out

    def spoil(model: Gpt) -> None:
        for i in (0, 2):
            model.layers[i].attention.__class__ = Uncausal

    judgement = result(references, tmp_path, spoil)
    assert [finding.module for finding in judgement.findings] == ["layers.0.attention", "layers.2.attention"]
    assert all(finding.alone for finding in judgement.findings)


def test_a_lost_gradient_is_its_modules(references: Path, tmp_path: Path) -> None:
    def spoil(model: Gpt) -> None:
        model.layers[1].mlp.fc1.weight.register_hook(torch.zeros_like)  # type: ignore[union-attr,operator]

    judgement = result(references, tmp_path, spoil)
    assert judgement.findings[0].module == "layers.1.mlp.fc1"
    assert judgement.findings[0].comparison.id.kind == "param_grad"


def test_a_clean_candidate_has_no_finding(references: Path, tmp_path: Path) -> None:
    judgement = result(references, tmp_path, lambda _model: None)
    assert judgement.exit is Exit.PASSED


def test_the_function_call_that_goes_wrong_is_named(references: Path, tmp_path: Path) -> None:
    """Inside a module, the first function whose result is wrong; what comes before it is right."""

    class Hasty(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            q, k, v = (p.reshape(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
            out: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(b, t, -1))
            return out

    found = []
    for isolated, folder in ((False, references), (True, references / "isolated")):
        inside = {"inside": ("layers.1.attention",)} if isolated else {}
        known = {"reference": folder / "reference", "isolated": isolated, **inside}
        again = tmp_path / f"again-{isolated}"
        if isolated:
            rerun = {"reference": references / "reference", "isolated": True, **inside}
            train(Plan(out=again / "reference", stop=False, **rerun), Gpt(), SimulatedRank(), {})  # type: ignore[arg-type]
            known["reference"] = again / "reference"
            for twin in range(1, NUM_TWINS + 1):
                plan = Plan(out=again / f"twin-{twin}", role="twin", twin=twin, stop=False, **known)  # type: ignore[arg-type]
                train(plan, Gpt(), SimulatedRank(), {})
            folder = again
        model = Gpt()
        model.layers[1].attention.__class__ = Hasty
        plan = Plan(out=tmp_path / str(isolated), role="candidate", stop=False, **known)  # type: ignore[arg-type]
        train(plan, model, SimulatedRank(), {})
        found.append(judge(folder, plan.out))
    finding = combine(*found).findings[0]
    assert finding.module == "layers.1.attention"
    assert finding.operation is not None
    assert finding.operation.name == "scaled_dot_product_attention"
    lines, first = inspect.getsourcelines(Hasty)
    assert "scale=0.3" in lines[int(finding.operation.source.rpartition(":")[2]) - first]


def built(folder: Path, *wrong: str, right: tuple[str, ...] = ()) -> Judgement:
    case = Case(folder)
    case.add_right(*right)
    case.add_wrong(*wrong)
    return case.judge()


def test_a_tensor_that_isolation_did_not_judge_is_not_said_to_be_wrong_or_right_alone(tmp_path: Path) -> None:
    ordinary = built(tmp_path / "a", "0/0/fc/output")
    other = built(tmp_path / "b", "0/0/fc/grad_input", right=("0/0/fc/input",))
    assert combine(ordinary, other).findings[0].alone is None


def test_what_is_wrong_alone_in_another_pass_says_nothing_of_this_one(tmp_path: Path) -> None:
    ordinary = built(tmp_path / "a", "0/0/fc/output")
    other = built(tmp_path / "b", "0/0/fc/grad_input", right=("0/0/fc/output",))
    assert combine(ordinary, other).findings[0].alone is False


def test_a_module_that_is_wrong_in_the_same_pass_is_wrong_alone(tmp_path: Path) -> None:
    """Another tensor of its code may show it: what enters a module inside is replaced."""
    ordinary = built(tmp_path / "a", "0/0/fc/output")
    other = built(tmp_path / "b", "0/0/fc/output.1", right=("0/0/fc/output",))
    assert combine(ordinary, other).findings[0].alone is True
