"""This module measures what recording costs: the CPU time of a traced step against a bare one, and the memory held.

The step is that of a 12-layer GPT in float32, recorded in full or as sketches: inputs, outputs and both gradients of
every module, the parameters and their gradients. CPU time is that of all threads, user and system. It ends when the
trace is closed, so that every byte has been handed to the kernel and synced; waiting for the disk is no CPU time. Bare
and traced steps alternate in random order, and each round gives one ratio.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from ttrace.adapters.native import Native
from ttrace.capture.plan import Plan
from ttrace.capture.session import Session
from ttrace.layouts.rules import Rules

RATIOS = {"full": 1.25, "sketch": 1.12}
HELD = 1.1
"""The bars: CPU time of a traced step over a bare one's; memory held over the plan's limit."""
NUM_ROUNDS = 11
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


@dataclass(frozen=True)
class Cost:
    """What one step took: CPU seconds, and the most memory the process had beyond what it had before, in bytes."""

    seconds: float
    peak: int


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

    def bare(self) -> Cost:
        return _cost(self.step)

    def traced(self, record: Literal["full", "sketch"]) -> Cost:
        shutil.rmtree(self.plan.out, ignore_errors=True)
        plan = self.plan.model_copy(update={"record": record})
        session = Session(plan, self.model, self.optimizer, Native([self.model]), Rules())

        def step() -> None:
            with session.step():  # the plan's only step: the trace is closed at its end
                self.step()

        return _cost(step)


def _cost(step: Callable[[], None]) -> Cost:
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start = _memory("VmRSS"), time.process_time()
    step()
    return Cost(time.process_time() - start, _memory("VmHWM") - before)


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def rounds(ways: Mapping[str, Callable[[], Cost]], chance: random.Random) -> list[dict[str, Cost]]:
    """Costs of bare and traced steps, each round in random order."""
    found = []
    for _ in range(NUM_ROUNDS):
        order = list(ways)
        chance.shuffle(order)
        found.append({name: ways[name]() for name in order})
    return found


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder) / "trace")
        ways: dict[str, Callable[[], Cost]] = {"bare": training.bare}
        ways |= {"full": lambda: training.traced("full"), "sketch": lambda: training.traced("sketch")}
        sizes = {}
        for name, warm_up in ways.items():
            warm_up()
            sizes[name] = sum(path.stat().st_size for path in training.plan.out.rglob("*") if path.is_file())
        found = rounds(ways, random.Random(0))
    is_met = True
    for name, bar in RATIOS.items():
        each = sorted(costs[name].seconds / costs["bare"].seconds for costs in found)
        held = statistics.median(costs[name].peak - costs["bare"].peak for costs in found)
        ratio, share = statistics.median(each), held / training.plan.max_bytes_held
        print(
            f"{name}: {ratio:.2f} times the CPU time of a bare step ({each[0]:.2f} to {each[-1]:.2f}), "
            f"{held / 2**20:.0f} MiB held ({share:.2f} of the limit), trace of {sizes[name] / 2**20:.0f} MiB "
            f"(bars {bar}, {HELD} of the limit)"
        )
        is_met = is_met and ratio <= bar and share <= HELD
    return int(not is_met)
