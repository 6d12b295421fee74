"""An embedding that is cut along the vocabulary is recorded without a trace in the training itself."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.trace.reader import Trace
from zoo.harness.ranks import on_ranks


class Words(nn.Module):
    """A model whose embedding is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(9, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.tok(ids)
        return rows


def embed(folder: Path) -> float:
    """Return the sum over all rows; the mask that torch keeps until ranks are summed must be there then."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan: dict[str, ParallelStyle] = {"tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    model = parallelize_module(Words(), mesh, plan)
    session = TracingSession(SessionParts(Plan(out=folder, stop=False), model, None, Native([model], mesh=mesh)))
    with session.step():
        out: torch.Tensor = model(session.batch(torch.arange(9).view(1, 9)))
        out.square().mean().backward()
    session.close()
    return float(out.sum())


def test_an_embedding_cut_along_the_vocabulary_still_sums(tmp_path: Path) -> None:
    first, second = on_ranks(2, embed, tmp_path / "trace")
    assert first == second
    assert list(Trace(tmp_path / "trace").problems()) == []
