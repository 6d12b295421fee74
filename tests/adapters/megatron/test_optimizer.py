"""Megatron's optimizers step copies of parameters; each parameter is found in the group of its copy."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from ttrace.adapters.megatron.optimizer import find_groups


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def test_parameters_are_found_by_their_copies() -> None:
    """Two chained optimizers: one that says where its copies come from, and a distributed one that keeps a map."""
    plain, half, far, foreign = parameters(4)
    copy = torch.zeros(2)
    decayed, exempt = {"params": [plain], "weight_decay": 0.1}, {"params": [copy], "weight_decay": 0.0}
    first = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[decayed, exempt]),
        float16_groups=[[half]],
        fp32_from_float16_groups=[[copy]],
    )
    sharded = {"params": [torch.zeros(1)], "weight_decay": 0.2}
    second = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[sharded]), model_param_group_index_map={far: (0, 0)}
    )
    chained = SimpleNamespace(chained_optimizers=[first, second])
    found = {id(parameter): group for parameter, group in find_groups(chained, [plain, half, far, foreign])}
    assert found == {id(plain): decayed, id(half): exempt, id(far): sharded}
