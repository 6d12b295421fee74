"""FSDP2 training that saves and loads torch's distributed checkpoints, on any number of ranks; one rank has no FSDP2.

`--steps N` trains, `--load FOLDER` goes on from a checkpoint, `--save FOLDER` writes one. With `--bug` the layers of a
checkpoint are loaded one place too far, as after a change of their numbers. `--forget` leaves out the optimizer.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ttrace

HIDDEN, NUM_LAYERS, VOCAB = 32, 3, 50
NUM_ROWS = 4 // int(os.environ.get("WORLD_SIZE", "1"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        return self.head(hidden)


def build():
    torch.manual_seed(0)
    model = Model()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def load(folder, model, optimizer, chosen):
    states, moments = get_state_dict(model, optimizer)
    dcp.load({"model": states} if chosen.forget else {"model": states, "optim": moments}, checkpoint_id=folder)
    if chosen.bug:
        for number in reversed(range(1, NUM_LAYERS)):
            states[f"layers.{number}.weight"].copy_(states[f"layers.{number - 1}.weight"])
    set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=moments)


def save(folder, model, optimizer):
    states, moments = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optim": moments}, checkpoint_id=folder)


def train(session, model, optimizer):
    with session.step():
        batch = session.batch(
            {"ids": torch.randint(VOCAB, (NUM_ROWS, 8)), "labels": torch.randint(VOCAB, (NUM_ROWS, 8))}
        )
        logits = model(batch["ids"]).flatten(0, 1)
        nn.functional.cross_entropy(logits, batch["labels"].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--forget", action="store_true")
    chosen = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    model, optimizer = build()
    session = ttrace.attach(model, optimizer)
    if chosen.load:
        load(chosen.load, model, optimizer, chosen)
    for _ in range(chosen.steps):
        train(session, model, optimizer)
    if chosen.save:
        save(chosen.save, model, optimizer)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
