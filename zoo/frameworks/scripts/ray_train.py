"""Trains in Ray Train's TorchTrainer on a local cluster: `python ray_train.py NUM_WORKERS`."""

import argparse
from pathlib import Path

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
"""The rows of a step on all workers together."""


def train_loop(config):
    context = train.get_context()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    if config["bug"] != "unprepared":  # otherwise every worker trains a model of its own
        model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    loader = prepare_data_loader(DataLoader(dataset, batch_size=BATCH // context.get_world_size(), shuffle=True))
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        if config["bug"] == "loss" and context.get_world_rank() == 1:
            loss = loss * 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train.report({"loss": loss.item()})


def start_cluster(num_cpus, num_tries=3):
    """Start a cluster; on a busy machine this may take longer than the 30 s that Ray waits."""
    while True:
        try:
            return ray.init(num_cpus=num_cpus, include_dashboard=False)
        except Exception:
            ray.shutdown()
            num_tries -= 1
            if not num_tries:
                raise


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("num_workers", type=int)
    parser.add_argument("--bug", choices=["unprepared", "loss"])
    options = parser.parse_args()
    start_cluster(options.num_workers + 1)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"bug": options.bug},
        scaling_config=train.ScalingConfig(num_workers=options.num_workers),
        run_config=train.RunConfig(storage_path=str(Path("runs/results").absolute())),
    )
    trainer.fit()
