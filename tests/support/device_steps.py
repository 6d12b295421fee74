"""A training step that changes tensors in place wherever it may, recorded on any device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ttrace.capture.parts import SessionParts
from ttrace.capture.session import TracingSession
from ttrace.trace.reader import Shard, Trace
from zoo.harness.plans import planned
from zoo.harness.runs import SimulatedRank

EMU: Any = torch.emu  # type: ignore[attr-defined]
WIDTH, VOCAB, LENGTH = 64, 600, 16


class InPlace(nn.Module):
    """A layer whose output is changed in place by what follows, and whose input is too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.act(self.up(x)))
        result: torch.Tensor = hidden.add_(x).mul_(0.5)
        return result


class Model(nn.Module):
    """Embedding, layers, head; a buffer that every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.Sequential(InPlace(), nn.LayerNorm(WIDTH), InPlace())
        self.head = nn.Linear(WIDTH, VOCAB)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embedding(ids))
        self.seen.add_(x.detach().mean((0, 1)))
        logits: torch.Tensor = self.head(x.to(self.head.weight.device))
        return logits.to(ids.device)


def trace_step(folder: Path, device: str, head: str | None = None, *, num_steps: int = 2, **settings: Any) -> Path:
    """Record some steps of training with clipping and accumulated gradients; the head may be on a device of its own."""
    torch.manual_seed(0)
    model = Model().to(device)
    model.head.to(head or device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    plan = planned(out=folder / "trace", num_steps=num_steps, microbatch_grads=True, **settings)
    session = TracingSession(SessionParts(plan, model, optimizer, SimulatedRank()))
    for _ in range(num_steps):
        with session.step():
            train_step(session, model, optimizer, device)
    session.close()
    return folder / "trace"


def train_step(session: Any, model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    for _ in range(2):
        ids, labels = torch.arange(2 * 4 * LENGTH).mul(7).remainder(VOCAB).view(2, 4, LENGTH).to(device)
        batch = session.batch({"ids": ids, "labels": labels})
        logits = model(batch["ids"])
        (F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def list_differences(expected: Path, actual: Path, atol: float = 0.0, *, in_order: bool = True) -> list[str]:
    """List the tensors that are not the same in both traces, and what was not recorded."""
    first, second = Trace(expected), Trace(actual)
    differences = list(second.problems())
    ours, theirs = _list_shards(first), _list_shards(second)
    assert len(ours) > 100
    if list(ours) != list(theirs) if in_order else ours.keys() != theirs.keys():
        differences.append("other records, or in another order")
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if a.record.is_generated and b.record.is_generated:
            continue
        x, y = a.read_stored().double(), b.read_stored().double()
        if x.shape != y.shape or not torch.allclose(x, y, rtol=0, atol=atol):
            differences.append(name)
        elif a.record.sketch and b.record.sketch and abs(a.record.sketch.mean - b.record.sketch.mean) > 1e-6:
            differences.append(f"{name}: another mean")
    return differences


def _list_shards(trace: Trace) -> dict[str, Shard]:
    shards = sorted((one for each in trace.shards.values() for one in each), key=lambda shard: shard.record.order)
    return {f"{shard.id} {shard.record.microbatch}": shard for shard in shards}
