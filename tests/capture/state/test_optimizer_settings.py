"""An optimizer's settings are read parameter by parameter, from whatever groups it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ttrace.capture.state.optimizer_settings import OptimizerSettings, read_settings
from zoo.harness.runs import SimulatedRank


def settings_of(optimizer: Any, model: nn.Module) -> OptimizerSettings:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return read_settings((names[p], group) for p, group in SimulatedRank().find_groups(optimizer, names))


def test_each_parameter_has_the_settings_of_its_group() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.0},
        {"params": model[1].parameters(), "lr": torch.tensor(0.5)},
        {"params": [], "lr": 7.0},
    ]
    found = settings_of(torch.optim.AdamW(groups, lr=0.01, foreach=False), model)
    assert found.by_parameter == {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1}  # nobody updates the last
    first, second = found.groups
    assert (first["lr"], second["lr"]) == ("0.01", "0.5")
    assert (first["weight_decay"], second["weight_decay"]) == ("0", "0.01")
    assert first["betas"] == "(0.9, 0.999)"
    assert "foreach" not in first


def test_groups_that_are_set_alike_are_kept_once() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    groups = [{"params": [p], "weight_decay": 0.0 if p.ndim < 2 else 0.1} for p in model.parameters()]
    found = settings_of(torch.optim.AdamW(groups, lr=0.01), model)
    assert len(found.groups) == 2
    assert {found.by_parameter[f"{layer}.bias"] for layer in range(50)} == {1}


def test_an_optimizer_of_another_make_says_what_it_has() -> None:
    model = nn.Linear(2, 2, bias=False)
    own = SimpleNamespace(param_groups=[{"params": [model.weight], "lr": "cosine", "betas": [0.9, None]}])
    found = settings_of([own, SimpleNamespace(), SimpleNamespace(param_groups=["odd"])], model)
    assert found == OptimizerSettings(({"lr": "cosine", "betas": "(0.9, None)"},), {"weight": 0})
