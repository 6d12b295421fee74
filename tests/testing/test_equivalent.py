"""What a test leaves behind: nothing if it passed or never ran, and its traces if it failed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ttrace
from ttrace.errors import TTraceError
from ttrace.testing import assert_equivalent


def train(scale: float = 1.0) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = ttrace.attach(model, optimizer)
    for _ in range(8):
        with session.step():
            (scale * model(session.batch(torch.randn(8, 4))).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()


def train_wrongly() -> None:
    train(scale=2.0)


@pytest.fixture(autouse=True)
def _temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.slow
def test_what_passes_leaves_nothing_behind(tmp_path: Path) -> None:
    assert_equivalent(train, ranks=1, twins=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_fails_keeps_its_traces(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="loss"):
        assert_equivalent(train_wrongly, train, ranks=1, twins=2, repeat=False)
    (folder,) = tmp_path.iterdir()
    assert (folder / "candidate").is_dir()


def test_what_cannot_be_called_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TTraceError, match="cannot be sent"):
        assert_equivalent(train, args=(lambda: None,))
    with pytest.raises(TTraceError, match="a function of a module's top level"):
        assert_equivalent(lambda: None)
    assert not list(tmp_path.iterdir())
