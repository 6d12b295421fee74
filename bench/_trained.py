"""Small transformers that are trained here on text, and clean candidates of them on real ranks.

The text is Python's own standard library; a token is a word, or another character, and rare words share tokens.
"""

from __future__ import annotations

import re
import sysconfig
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from bench._ranks import NUM_RANKS
from ttrace.judge.verdict import Judgement
from zoo.harness.candidate import BATCH, Cell
from zoo.harness.cells import judge_all, trace_cell
from zoo.harness.ranks import on_ranks
from zoo.harness.transformer import Shape, Transformer

NUM_STEPS = 2
NUM_TRAINING_STEPS = 300
_LEARNING_RATE = 3e-3
_NUM_CHARACTERS = 4_000_000
LAYOUTS = ("tp", "tp+sp", "fsdp", "pp-1f1b", "cp-gather", "cp-ring")
T = TypeVar("T")


@dataclass(frozen=True)
class TrainedModel:
    """What was trained, from which seed."""

    seed: int
    hidden: int
    num_layers: int
    vocab: int = 4096
    length: int = 128

    @property
    def name(self) -> str:
        return f"hidden {self.hidden}, {self.num_layers} layers, seed {self.seed}"

    @property
    def shape(self) -> Shape:
        return Shape(
            vocab=self.vocab,
            hidden=self.hidden,
            heads=self.hidden // 32,
            kv_heads=2,
            ffn=self.hidden * 11 // 4,
            num_layers=self.num_layers,
            length=self.length,
        )


MODELS = (
    TrainedModel(0, 128, 4),
    TrainedModel(1, 128, 4),
    TrainedModel(2, 256, 4),
    TrainedModel(3, 256, 2),
)


@dataclass(frozen=True)
class Weights:
    """Gives a model, or a stage of it, its trained weights."""

    file: Path

    def __call__(self, model: nn.Module) -> None:
        model.load_state_dict(torch.load(self.file), strict=False)


def train(model: TrainedModel, file: Path) -> float:
    """Train a model and save its weights; return its last loss."""
    torch.manual_seed(model.seed)
    network = Transformer(model.shape)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    text = read_text(model.vocab)
    loss = torch.zeros(())
    for step in range(NUM_TRAINING_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / 20)
        rows = _cut_rows(text, 4, model.length)
        loss = F.cross_entropy(network(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(network.state_dict(), file)
    return float(loss.detach())


def judge_trained(dtypes: Sequence[torch.dtype], keep: Callable[[Judgement], T]) -> Iterator[tuple[str, T]]:
    """Train every model, and judge it under every layout; yield each one's name and what is kept of its judgement."""
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            weights = Path(folder) / f"{model.seed}.pt"
            loss = train(model, weights)
            for dtype in dtypes:
                cells = [Cell(layout, NUM_RANKS, dtype, own_parameters=True, num_steps=NUM_STEPS) for layout in LAYOUTS]
                found = on_ranks(NUM_RANKS, _judge, Path(folder), model, weights, cells, keep, timeout=1800.0)[0]
                precision = str(dtype).removeprefix("torch.")
                for cell, kept in zip(cells, found, strict=True):
                    yield f"{model.name} (loss {loss:.1f}), {precision}, {cell.layout}=2", kept


def _judge(
    folder: Path, model: TrainedModel, weights: Path, cells: list[Cell], keep: Callable[[Judgement], Any]
) -> list[Any]:
    place = folder / f"{model.seed}-{cells[0].dtype}"
    references: dict[Any, Path] = {}
    with text_as_data(model.vocab):
        traced = [trace_cell(cell, place, replace(model.shape, adapt=Weights(weights)), references) for cell in cells]
    return judge_all(traced, keep)


@contextmanager
def text_as_data(vocab: int) -> Iterator[None]:
    """Have references train on text, and candidates on what their references had."""

    def read_batch(shape: Shape) -> dict[str, torch.Tensor]:
        rows = _cut_rows(read_text(vocab), BATCH, shape.length)
        return {"ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    keeps = mock.patch("ttrace.capture.probes.generator.measure_batch", return_value=None)
    with keeps, mock.patch("zoo.harness.candidate.data", read_batch):
        yield


def _cut_rows(text: torch.Tensor, num_rows: int, length: int) -> torch.Tensor:
    starts = torch.randint(len(text) - length - 1, (num_rows,))
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()])


@cache
def read_text(vocab: int) -> torch.Tensor:
    """Read the standard library as tokens."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)[:_NUM_CHARACTERS]
    words = re.findall(r"\w+|\s+|.", text)
    common = [word for word, _ in Counter(words).most_common(vocab // 2)]
    numbers = {word: number for number, word in enumerate(common)}
    rest = vocab - len(common)
    return torch.tensor([numbers.get(word, len(common) + zlib.crc32(word.encode()) % rest) for word in words])
