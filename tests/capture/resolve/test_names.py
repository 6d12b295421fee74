"""What lies in a model has the name by which the reference calls it, and no two things have one name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import Declarations, SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.resolve.names import Names, find_evaluated, list_modules
from ttrace.capture.session import TracingSession
from ttrace.errors import CaptureError
from ttrace.layouts.rules import Rules
from ttrace.trace.reader import Trace


class Wrapper(nn.Module):
    """As DistributedDataParallel keeps what it wraps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(x)
        return out


class Scaled(Wrapper):
    """No wrapper, but has a module that is called as wrappers call theirs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.weight


def averaged(module: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(module)


@pytest.mark.parametrize("wrap", [Wrapper, checkpoint_wrapper, averaged, lambda module: Wrapper(Wrapper(module))])
def test_a_wrappers_level_is_left_out(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), wrap(nn.Sequential(nn.Linear(2, 2))))
    parameters, _ = Names([wrap(model)]).parameters()
    assert list(parameters) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]


@pytest.mark.parametrize("wrap", [lambda module: module, Wrapper])
@pytest.mark.parametrize(
    "inner", [nn.Linear(2, 2, bias=False), Wrapper(nn.Linear(2, 2, bias=False))], ids=["bare", "wrapped"]
)
def test_a_level_that_keeps_names_apart_is_kept(wrap: Callable[[nn.Module], nn.Module], inner: nn.Module) -> None:
    names = Names([wrap(nn.ModuleDict({"a": Scaled(inner)}))])
    assert list(names.parameters()[0]) == ["a.weight", "a.module.weight"]
    assert {"a", "a.module"} <= {name for name, _ in names.modules()}
    assert list(names.buffers()) == ["a.table"]


def test_two_parameters_of_one_name_are_refused() -> None:
    names = Names([nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))], lambda *_: "same")
    with pytest.raises(CaptureError, match=r"0\.weight and 1\.weight of Sequential would both be called same"):
        names.parameters()


def test_tied_weights_may_share_what_they_like() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    parameters, aliases = Names([model]).parameters()
    assert list(parameters) == ["0.weight"]
    assert aliases == {"1.weight": "0.weight"}


def test_any_name_of_a_module_is_traced(tmp_path: Path) -> None:
    model = nn.Sequential()
    for name in ("a/b", "a b", "x@1", "50%"):
        model.add_module(name, nn.Linear(2, 2))
    session = TracingSession(
        SessionParts(
            Plan(out=tmp_path, stop=False),
            model,
            None,
            Native([model]),
            Declarations(rules=Rules.of({"a%2Fb/output": "t h"})),
        )
    )
    with session.step():
        batch = session.batch({"in put": torch.randn(3, 2), "in/put": torch.randn(3, 2)})
        model(batch["in put"] + batch["in/put"]).sum().backward()
    session.close()
    trace = Trace(tmp_path)
    assert not list(trace.problems())
    found = {str(tensor_id) for tensor_id in trace.shards}
    assert found >= {f"0/0/{name}/output" for name in ("a%2Fb", "a%20b", "x%401", "50%25")}
    assert found >= {"0/-/a%2Fb.weight/param_grad", "0/0/./batch.in%20put", "0/0/./batch.in%2Fput"}
    assert set(trace.manifest.modules) == {".", "a%2Fb", "a%20b", "x%401", "50%25"}
    assert not trace.notes, "the rule matched"


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.num, self._hidden = 0.5, 3, 0.25


def test_modules_are_listed_with_their_settings() -> None:
    model = nn.ModuleDict(
        {"drop": nn.Dropout(0.1), "norm": nn.BatchNorm1d(4, momentum=None), "act": nn.GELU("tanh"), "own": Numbered()}
    )
    found = {name: info.settings for name, info in list_modules(Names([model])).items()}
    assert found == {
        ".": {},
        "drop": {"p": "0.1"},
        "norm": {"eps": "1e-05", "momentum": "None"},
        "act": {"approximate": "tanh"},
        "own": {"scale": "0.5"},
    }


def test_a_norm_without_statistics_has_no_momentum() -> None:
    model = nn.ModuleList([nn.InstanceNorm1d(4)])
    assert list_modules(Names([model]))["0"].settings == {"eps": "1e-05"}


def test_modules_that_training_mode_changes_are_found() -> None:
    model = nn.ModuleDict({"drop": nn.Dropout(0.1), "norm": nn.BatchNorm1d(4), "fc": nn.Linear(4, 4)})
    assert find_evaluated(dict(model.named_modules())) == ()
    assert find_evaluated(dict(model.eval().named_modules())) == ("drop", "norm")
    model["drop"].train()
    assert find_evaluated(dict(model.named_modules())) == ("norm",)


def test_the_rate_of_dropout_is_recorded_before_it_is_switched_off(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)).eval()
    plan = Plan(out=tmp_path / "reference", stop=False)
    session = TracingSession(SessionParts(plan, model, None, Native([model])))
    with session.step():
        model(session.batch(torch.randn(2, 4))).sum().backward()
    trace = Trace(plan.out)
    assert trace.manifest.modules["1"].settings == {"p": "0.3"}
    end = trace.ranks[0].end
    assert end is not None
    assert end.evaluated == ("1",)
