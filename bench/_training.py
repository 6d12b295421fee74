"""The training step on which recording is measured: that of a 12-layer GPT in float32."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession

VOCAB, HIDDEN, NUM_LAYERS, NUM_HEADS, SEQ, BATCH = 1024, 256, 12, 8, 256, 4


class Block(nn.Module):
    """Attention and MLP, each after a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, seq, NUM_HEADS, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, HIDDEN))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]  # a module's call is Any


def gpt() -> nn.Module:
    blocks = (Block() for _ in range(NUM_LAYERS))
    return nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *blocks, nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB))


class Training:
    """A model that can run one step, bare or traced."""

    def __init__(self, folder: Path) -> None:
        self.plan = Plan(out=folder, stop=False, parameters="own", skip=("*/param_after", "*/optim"))
        self.model = gpt()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.ids, self.labels = torch.randint(VOCAB, (2, BATCH, SEQ))

    def step(self) -> None:
        logits = self.model(self.ids)
        F.cross_entropy(logits.flatten(0, 1), self.labels.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def traced(self, record: Literal["full", "sketch"]) -> Callable[[], None]:
        """A step that is recorded. It ends when its trace is closed; an earlier one is removed before it starts."""
        shutil.rmtree(self.plan.out, ignore_errors=True)
        plan = self.plan.model_copy(update={"record": record})
        session = TracingSession(SessionParts(plan, self.model, self.optimizer, Native([self.model])))

        def step() -> None:
            with session.step():  # the plan's only one
                self.step()

        return step
