"""FSDP2 training that saves and loads torch's distributed checkpoints on any number of ranks; one rank has no FSDP2."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ttrace  # 1

HIDDEN, NUM_LAYERS, VOCAB = 32, 3, 50
NUM_ROWS = 4 // int(os.environ.get("WORLD_SIZE", "1"))

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=0, help="how many steps to train")
parser.add_argument("--load", help="the checkpoint to go on from")
parser.add_argument("--save", help="where to write one")
parser.add_argument("--bug", action="store_true", help="load layers one place too far, as if their numbers had changed")
parser.add_argument("--forget", action="store_true", help="load no state of the optimizer")


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


def load(args, model, optimizer):
    states, moments = get_state_dict(model, optimizer)
    dcp.load({"model": states} if args.forget else {"model": states, "optim": moments}, checkpoint_id=args.load)
    for number in reversed(range(1, NUM_LAYERS if args.bug else 1)):
        states[f"layers.{number}.weight"].copy_(states[f"layers.{number - 1}.weight"])
    set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=moments)


def main(args):
    torch.manual_seed(0)
    model = Model()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    session = ttrace.attach(model, optimizer)  # 2
    if args.load:
        load(args, model, optimizer)
    for _ in range(args.steps):
        batch = {name: torch.randint(VOCAB, (NUM_ROWS, 8)) for name in ("ids", "labels")}
        with session.step():  # 3
            batch = session.batch(batch)  # 4
            logits = model(batch["ids"]).flatten(0, 1)
            nn.functional.cross_entropy(logits, batch["labels"].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    if args.save:
        states, moments = get_state_dict(model, optimizer)
        dcp.save({"model": states, "optim": moments}, checkpoint_id=args.save)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
