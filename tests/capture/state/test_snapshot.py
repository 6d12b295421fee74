"""A snapshot restores what a training step has changed."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ttrace.capture.state.snapshot import Snapshot


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()


def test_the_state_of_an_optimizer_that_has_stepped_is_restored_with_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    snapshot = Snapshot([model], [optimizer], with_parameters=True)
    for _ in range(2):  # a snapshot can be restored several times
        train(model, optimizer)
        snapshot.restore()
        assert set(optimizer.state) == set(model.parameters())
        torch.testing.assert_close([model.state_dict(), optimizer.state_dict()], saved, rtol=0, atol=0)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_frozen_table_is_restored_and_gradients_are_kept_on_demand() -> None:
    first, last = nn.Linear(8, 8), nn.Linear(8, 512)
    model, table = nn.Sequential(first, last), last.weight.requires_grad_(False)
    with torch.no_grad():
        table.copy_(torch.arange(4096.0).view(512, 8))
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    snapshot, before = Snapshot([model], [optimizer], with_parameters=False), table.clone()
    train(model, optimizer)
    with torch.no_grad():
        table.mul_(0.9)  # as a script does with a teacher that follows the model
    snapshot.restore(keeps_gradients=True)
    assert torch.equal(table, before)
    assert first.weight.grad is not None
