"""What an optimizer was told is read from whatever groups it has."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from ttrace.capture.settings import settings_of


def test_all_values_of_all_groups_are_told() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [
        {"params": first.parameters(), "weight_decay": 0.0},
        {"params": last.parameters(), "lr": torch.tensor(0.5)},
        {"params": [], "lr": 7.0},
    ]
    found = settings_of([torch.optim.AdamW(groups, lr=0.01, foreach=False)])
    assert found["lr"] == ("0.01", "0.5")
    assert found["weight_decay"] == ("0", "0.01")
    assert found["betas"] == ("(0.9, 0.999)",)
    assert "foreach" not in found


def test_an_optimizer_of_another_make_says_what_it_has() -> None:
    own = SimpleNamespace(param_groups=[{"params": [1], "lr": "cosine", "betas": [0.9, None]}])
    assert settings_of([own, SimpleNamespace()]) == {"lr": ("cosine",), "betas": ("(0.9, None)",)}  # type: ignore[list-item]
