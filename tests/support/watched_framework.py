"""The loop of `trainer`, `lightning` or `deepspeed`, watched; `--flip` changes a weight of rank 1."""

import argparse
import atexit
import importlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import ttrace

parser = argparse.ArgumentParser()
parser.add_argument("framework", choices=("trainer", "lightning", "deepspeed"))
parser.add_argument("--flip", action="store_true")
args = parser.parse_args()
RANK, NUM_STEPS, WIDTH = int(os.environ["RANK"]), 6, 8
SETTINGS: dict[str, Any] = {"every": 2, "out": "watched"}


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return {name: torch.randn(WIDTH, generator=drawn) for name in ("x", "labels")}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.num_calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        if args.flip and RANK == 1 and self.num_calls == 5:
            self.second.weight.detach().view(torch.int32)[2, 3] ^= 1 << 19
        return {"loss": (self.second(self.first(x).relu()) - labels).square().mean()}


def run_trainer() -> Any:
    from transformers import Trainer, TrainingArguments

    from ttrace.callbacks.transformers import WatchCallback

    callback = WatchCallback(**SETTINGS)
    settings = TrainingArguments(
        "unused",
        max_steps=NUM_STEPS,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(Net(), settings, train_dataset=Rows(), callbacks=[callback]).train()
    return callback.monitor


def run_lightning() -> Any:
    import lightning
    from torch.utils.data import DataLoader

    from ttrace.callbacks.lightning import WatchCallback

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Any:  # noqa: ARG002
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    callback = WatchCallback(**SETTINGS)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=NUM_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(Model(), DataLoader(Rows(), batch_size=4))
    return callback.monitor


def run_deepspeed() -> Any:
    deepspeed: Any = importlib.import_module("deepspeed")

    # It would be compiled, for minutes.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    dist.init_process_group("gloo")
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config={**config, "zero_allow_untested_optimizer": True}
    )
    monitor = ttrace.watch(engine, **SETTINGS)
    rows = Rows()
    for step in range(NUM_STEPS):
        some = [rows[8 * step + 4 * RANK + i] for i in range(4)]
        batch = {name: torch.stack([row[name] for row in some]) for name in some[0]}
        engine.backward(engine(**batch)["loss"])
        engine.step()
    return monitor


torch.manual_seed(0)
monitor = {"trainer": run_trainer, "lightning": run_lightning, "deepspeed": run_deepspeed}[args.framework]()
if RANK == 0:
    print(f"{monitor.num_checks} checks: {[str(each) for each in monitor.disagreements]}", flush=True)
# As tensor_parallel_checkpoint.py: threads of torch may abort the process while Python ends.
atexit._run_exitfuncs()
os._exit(0)
