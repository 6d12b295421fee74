"""Buffers after a universal checkpoint of DeepSpeed: python docs/found/deepspeed_universal_buffers.py FOLDER"""

import argparse
import importlib
import os
import sys
from pathlib import Path

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn

importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # it would be compiled, for minutes
folder = Path(sys.argv[1])


def make_engine(is_universal):
    """A linear layer, and a batch norm whose statistics are buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 1},
        "checkpoint": {"load_universal": is_universal},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


deepspeed.init_distributed(dist_backend="gloo")
first = make_engine(is_universal=False)
for _ in range(3):
    first.backward(first(torch.randn(8, 4) + 5).square().mean())
    first.step()
first.save_checkpoint(str(folder), tag="own")
options = argparse.Namespace(
    input_folder=str(folder / "own"),
    output_folder=str(folder / "universal"),
    num_extract_workers=1,
    num_merge_workers=1,
    keep_temp_folder=False,
    strict=True,
    inject_missing_state=True,
)
importlib.import_module("deepspeed.checkpoint.ds_to_universal").main(options)
for is_universal in (False, True):
    engine = make_engine(is_universal=is_universal)
    engine.load_checkpoint(str(folder), tag="universal" if is_universal else "own")
    weight, mean = (
        tensor - other
        for tensor, other in zip(
            (engine.module[0].weight, engine.module[1].running_mean),
            (first.module[0].weight, first.module[1].running_mean),
            strict=True,
        )
    )
    kind = "universal" if is_universal else "own"
    print(
        f"deepspeed {deepspeed.__version__}, {kind} checkpoint: weights differ by {weight.abs().max():.3g}, "
        f"running means by {mean.abs().max():.3g}"
    )
