"""Tensor parallelism that saves and loads distributed checkpoints; `--bug` loads one weight one row too far."""

import argparse
import os
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ttrace

VOCAB = 50  # 2 and 4 ranks have uneven shares of it


def main() -> None:
    """Train, with the batches that TTrace gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCAB, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, VOCAB)
    )
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        plan = {
            "0": RowwiseParallel(input_layouts=Replicate()),
            "1": ColwiseParallel(),
            "3": RowwiseParallel(),
            "4": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    session = ttrace.attach(model, optimizer)
    if args.load:
        states, moments = get_state_dict(model, optimizer)
        load({"model": states, "optim": moments}, checkpoint_id=args.load)
        if args.bug:
            local = cast(DTensor, states["4.weight"]).to_local()
            local.copy_(local.roll(1, 0))
        set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=moments)
    for _ in range(args.steps):
        with session.step():
            batch = session.batch({name: torch.randint(VOCAB, (4, 8)) for name in ("ids", "labels")})
            logits = model(batch["ids"])
            nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    if args.save:
        states, moments = get_state_dict(model, optimizer)
        save({"model": states, "optim": moments}, checkpoint_id=args.save)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
