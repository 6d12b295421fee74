"""Whatever reads a tensor without data gets what a tensor with the same values gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ttrace

OPERATORS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda w: w.sum(),
    "transposed": lambda w: torch.ones(3, 4) @ w.mT,
    "rows": lambda w: w[1, 2:5] * 2,
    "columns": lambda w: w[..., 1:3].clone(),
    "strided": lambda w: w[:, ::2, ::3] + 1,
    "one": lambda w: w[1, 2, 3] + 0,
    "expanded": lambda w: w[0, 0].expand(7, 4) * 1,
    "cast": lambda w: w.to(torch.bfloat16)[:, 1:] * 1,
    "cast of a view": lambda w: w.mT.to(torch.float64).sum(0),
    "split": lambda w: [part * 1 for part in w.split(2, dim=1)],
    "unbound": lambda w: [part * 1 for part in w],
    "last": lambda w: w[-1] * 1,
    "twice": lambda w: w * w.mT.mT + w,
    "indexed": lambda w: w[torch.tensor([1, 0, 1])] * 1,
    "reshaped": lambda w: w.reshape(-1)[5:9] * 1,
    "other bits": lambda w: w.detach().view(torch.int32) + 0,
    "negated view": lambda w: torch._neg_view(w.detach()) + 0,
    "itself": lambda w: w.contiguous().detach() + 0,
    "without elements": lambda w: w[:, 2:2].sum(1),
    "like": lambda w: torch.zeros_like(w),
}


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 5, 4))


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_read_the_values(name: str) -> None:
    streamed: Any = ttrace.streamed(Held).weight
    ordinary = streamed.detach().clone().requires_grad_()
    assert type(ordinary) is torch.Tensor
    ours, theirs = (OPERATORS[name](weight) for weight in (streamed, ordinary))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    outputs = ours if isinstance(ours, list) else [ours]
    if not outputs[0].requires_grad:
        return
    for made in (ours, theirs):
        sum(part.double().square().sum() for part in (made if isinstance(made, list) else [made])).backward()
    parts = [leaf.grad for _, leaf in sorted(streamed.leaves.items())]
    found = streamed.grad if streamed.grad is not None else torch.zeros(2, 5, 4)
    for row, (start, leaf) in zip(parts, sorted(streamed.leaves.items()), strict=True):
        found[start : start + leaf.shape[0]] += row
    torch.testing.assert_close(found, ordinary.grad, rtol=0, atol=0)


def test_it_says_what_it_is() -> None:
    weight: Any = ttrace.streamed(Held).weight
    assert "Streamed(weight, shape=(2, 5, 4), dtype=torch.float32)" in repr(weight)


def test_what_an_operator_returns_is_not_overwritten_by_the_next() -> None:
    weight: Any = ttrace.streamed(lambda: nn.Linear(4, 4)).weight
    kept = weight.detach().contiguous().reshape(-1).clone()
    first = weight.detach().view(torch.int32)
    before = first.clone()
    (weight * 2).sum()
    assert torch.equal(first, before)
    assert torch.equal(weight.detach().reshape(-1) * 1, kept)


@pytest.mark.parametrize("padding", [None, 3, -1])
def test_an_embedding_gives_the_dense_gradient_in_rows(padding: int | None) -> None:
    table: Any = ttrace.streamed(lambda: nn.Embedding(7, 4, padding_idx=padding))
    ordinary = table.weight.detach().clone().requires_grad_()
    index = torch.tensor([[3, 1, 3], [6, 6, 6]])
    (table(index) ** 3).sum().backward()
    (F.embedding(index, ordinary, padding_idx=padding) ** 3).sum().backward()
    assert table.weight.grad.is_sparse
    assert torch.equal(table.weight.grad.to_dense(), ordinary.grad)
