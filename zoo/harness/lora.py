"""LoRA adapters in the small GPT, on both layers of its feed-forwards, with tensor parallelism written by hand.

The factor that touches the cut side of a layer is cut with it; the other one is whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zoo.harness.candidate import Candidate, Cell
from zoo.harness.gpt import RULES, AllReduce, Column, Gpt, Row, keep_part
from zoo.harness.small import HAND, Small, train_by_hand
from zoo.harness.transformer import Shape

RANK = 4
LORA_RULES = {
    "*.fc1.base.*": "out/tp ...",
    "*.fc1.base/output": "batch seq hidden/tp",
    "*.fc1.b.weight": "out/tp in",
    "*.fc1.b/output": "batch seq hidden/tp",
    "*.fc1.b/grad_input": "batch seq rank +tp",
    "*.fc2.base.weight": "out in/tp",
    "*.fc2.base/input": "batch seq hidden/tp",
    "*.fc2.a.weight": "out in/tp",
    "*.fc2.a/input": "batch seq hidden/tp",
    "*.fc2.a/output": "batch seq hidden +tp",
    **{name: layout for name, layout in RULES.items() if name not in ("*.fc1.*", "*.fc2.weight")},
}


class ColumnLora(nn.Module):
    """An adapted layer that is cut along its output, and so is the second factor."""

    def __init__(self, base: Column) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, RANK, bias=False)
        self.b = nn.Linear(RANK, base.out_features * base.tp, bias=False)
        self.b.weight = keep_part(self.b.weight, 0, base.tp)
        self.sums_gradients = base.tp > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = AllReduce.apply(self.a(x), False, self.sums_gradients)  # type: ignore[no-untyped-call]
        out: torch.Tensor = self.base(x) + self.b(inner)
        return out


class RowLora(nn.Module):
    """An adapted layer that is cut along its input, and so is the first factor."""

    def __init__(self, base: Row) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features * base.tp, RANK, bias=False)
        self.a.weight = keep_part(self.a.weight, 1, base.tp)
        self.b = nn.Linear(RANK, base.out_features, bias=False)
        self.sums_again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = AllReduce.apply(self.a(x), self.base.tp > 1, False)  # type: ignore[no-untyped-call]
        delta = AllReduce.apply(self.b(inner), self.sums_again, False)  # type: ignore[no-untyped-call]
        out: torch.Tensor = self.base(x) + delta
        return out


def adapted_gpt(tp: int) -> Gpt:
    model = Gpt(tp)
    for layer in model.layers:
        mlp: Any = layer.mlp
        mlp.fc1, mlp.fc2 = ColumnLora(mlp.fc1), RowLora(mlp.fc2)
    return model


def adapted_by_hand(_shape: Shape, cell: Cell) -> Candidate:
    return train_by_hand(adapted_gpt(dist.get_world_size()), cell, LORA_RULES)


def whole(_shape: Shape) -> nn.Module:
    return adapted_gpt(1)


ADAPTED = Small(Cell("hand", 2), HAND, adapted_by_hand, whole)
"""The case of entries with adapters."""
