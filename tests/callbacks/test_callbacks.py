"""Callbacks trace a training that the script starts through a framework, without the hook."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import ttrace.callbacks.lightning
import ttrace.callbacks.transformers
from tests.support.attributes import Attributes
from tests.support.loops import trace_loop
from ttrace.attach import PLAN_VARIABLE
from ttrace.automatic import installation
from ttrace.capture.plan import Plan
from ttrace.errors import CaptureError, LayoutError
from ttrace.trace.reader import Trace

pytestmark = pytest.mark.filterwarnings("ignore")  # frameworks warn of what they call themselves

Train = Callable[..., object]
"""It trains for some steps, with callbacks or without."""


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.last(self.first(x).relu()), labels)}


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Classifier()

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.net(*batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 8, generator=generator), torch.randint(4, (64,), generator=generator)


def train_with_transformers(folder: Path, *callbacks: TrainerCallback, num_steps: int = 3) -> nn.Module:
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=num_steps,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"x": x, "labels": y} for x, y in zip(*make_rows(), strict=True)]
    model = Classifier()
    Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks)).train()
    return model


def train_with_lightning(folder: Path, *callbacks: lightning.Callback, num_steps: int = 3) -> nn.Module:
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=num_steps,
        accumulate_grad_batches=2,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Module()
    trainer.fit(model, DataLoader(TensorDataset(*make_rows()), 4))
    return model


FRAMEWORKS = pytest.mark.parametrize(
    ("train", "callback"),
    [
        (train_with_transformers, ttrace.callbacks.transformers.TTraceCallback),
        (train_with_lightning, ttrace.callbacks.lightning.TTraceCallback),
    ],
    ids=["transformers", "lightning"],
)


@pytest.fixture(autouse=True)
def _without_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_installed", [])
    monkeypatch.setattr("atexit.register", lambda _: None)
    monkeypatch.setattr(installation, "on_attach", lambda _: None)


def trace_with_callback(folder: Path, train: Callable[[], object], **settings: object) -> Trace:
    """Run as `ttrace run --attach script` does: without the hook."""
    Plan.model_validate({"out": folder / "trace", "stop": False, **settings}).save(folder / "plan.json")
    with mock.patch.dict(os.environ, {PLAN_VARIABLE: str(folder / "plan.json")}):
        train()
    return Trace(folder / "trace")


@FRAMEWORKS
def test_a_callback_traces_what_the_hook_would(train: Train, callback: Any, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("hook", "callback")]
    for folder in folders:
        folder.mkdir()
    ours = trace_loop(folders[0], lambda: train(tmp_path))
    theirs = trace_with_callback(folders[1], lambda: train(tmp_path, callback()))
    assert theirs.manifest.attachment == ours.manifest.attachment
    assert list(theirs.shards) == list(ours.shards)
    assert all(theirs.shards[t][0].read_stored().equal(ours.shards[t][0].read_stored()) for t in ours.shards)


@FRAMEWORKS
def test_a_callback_does_nothing_without_ttrace(train: Train, callback: Any, tmp_path: Path) -> None:
    bare: Any = train(tmp_path)
    attributes = Attributes(["torch", "transformers", "lightning"])
    attended: Any = train(tmp_path, callback())
    assert list(attributes.changes()) == []
    pairs = zip(bare.parameters(), attended.parameters(), strict=True)
    assert all(ours.equal(theirs) for ours, theirs in pairs)


@FRAMEWORKS
def test_what_the_script_declares_reaches_the_session(train: Train, callback: Any, tmp_path: Path) -> None:
    declared = callback(rules={"no.such.site/output": "batch hidden/tp"}, mesh={"tp": 1})
    trace = trace_with_callback(tmp_path, lambda: train(tmp_path, declared))
    assert trace.mesh.sizes == {"tp": 1}
    with pytest.raises(LayoutError, match="hidden//"):
        trace_with_callback(tmp_path, lambda: train(tmp_path, callback(rules={"a/output": "hidden//"})))


@FRAMEWORKS
def test_a_training_that_is_too_short_is_an_error(train: Train, callback: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="at least two"):
        trace_with_callback(tmp_path, lambda: train(tmp_path, callback(), num_steps=1))


@pytest.mark.parametrize("kind", [ttrace.callbacks.transformers, ttrace.callbacks.lightning])
def test_an_argument_that_attach_does_not_have_is_an_error(kind: Any) -> None:
    with pytest.raises(TypeError, match="rule"):
        kind.TTraceCallback(rule="rules.toml")
