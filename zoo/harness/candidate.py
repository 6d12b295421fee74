"""Candidates of the matrix, and how they and their references train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ttrace.capture.session import TracingSession
from zoo.harness.transformer import Shape

BATCH = 2
CLIPPED = frozenset({"ddp", "zero", "fsdp", "hsdp", "tp+sp", "cp-gather", "cp-ulysses", "cp-ring", "cp-ring+fsdp"})
"""The layouts whose gradients torch can clip by itself: all on one mesh, or all whole."""
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of logits and labels."""


def default_device_type() -> str:
    """Where candidates train: torch's default device."""
    return torch.get_default_device().type


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


@dataclass(frozen=True)
class Cell:
    """One way to run the candidate."""

    layout: str
    num_ranks: int = 2
    dtype: torch.dtype = torch.float32
    recompute: str = "none"
    num_microbatches: int = 2
    microbatch_grads: bool = False
    loss: Loss = loss_of
    trusted_loss: Loss | None = None
    """The reference's, where the candidate's is written differently."""
    is_clipped: bool = False
    """Whether gradients are clipped also where torch cannot do it by itself: then the case does it."""
    own_parameters: bool = False
    """Whether both sides start as they initialised themselves."""
    seed: int = 0
    """Of all values that are generated."""
    num_steps: int = 1
    record: str = "auto"
    """What is recorded, as in a plan."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw
    """What both sides train with, in the layouts "hand" and "ddp"."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parallelisms of which the layout consists."""
        return tuple(self.layout.split("+"))

    @property
    def max_norm(self) -> float | None:
        """Where gradients are clipped, if they are: far below their norm."""
        return 0.1 if self.is_clipped or self.layout in CLIPPED else None

    @property
    def settings(self) -> dict[str, Any]:
        """What plans of both sides say."""
        parameters = "own" if self.own_parameters else "generated"
        recorded = {"record": self.record} if self.record != "auto" else {}
        return {
            **recorded,
            "microbatch_grads": self.microbatch_grads,
            "parameters": parameters,
            "seed": self.seed,
            "num_steps": self.num_steps,
        }

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.layout}-{dtype}-{self.recompute}-{self.num_microbatches}"


@dataclass
class Candidate:
    """A parallelised model, ready to be attached to."""

    chunks: list[nn.Module]
    optimizer: torch.optim.Optimizer
    step: Callable[[TracingSession], None]
    num_data_ranks: int = 1
    mesh: Any = None
    rules: dict[str, str] | None = None
    grad_factor: float | None = None
    schedule: Any = None
    """Of a pipeline."""


def accumulated(
    session: TracingSession,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shape: Shape,
    num_microbatches: int,
    *,
    max_norm: float | None = None,
    loss: Loss = loss_of,
    loss_region: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """One step of gradient accumulation."""
    with session.step():
        for _ in range(num_microbatches):
            batch = session.batch(data(shape))
            logits = model(batch["ids"])
            with loss_region():
                (loss(logits, batch["labels"]) / num_microbatches).backward()
        updated(model, optimizer, max_norm)


def updated(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


def data(shape: Shape) -> dict[str, torch.Tensor]:
    ids, labels = torch.randint(shape.vocab, (2, BATCH, shape.length))
    return {"ids": ids, "labels": labels}


def simple(
    model: nn.Module,
    shape: Shape,
    cell: Cell,
    *,
    num_data_ranks: int = 1,
    optimizer: Any = None,
    loss_region: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Candidate:
    """A candidate that is trained like the reference."""
    chosen = optimizer or cell.optimizer(model.parameters())

    def step(session: TracingSession) -> None:
        accumulated(
            session,
            model,
            chosen,
            shape,
            cell.num_microbatches,
            max_norm=cell.max_norm,
            loss=cell.loss,
            loss_region=loss_region,
        )

    return Candidate([model], chosen, step, num_data_ranks)
