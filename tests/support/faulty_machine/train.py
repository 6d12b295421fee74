"""Training script: every bit of it is printed, and faults happen where its arguments say.

An argument `MOMENT:FAULT:WORDS` is a fault of every rank, `1@MOMENT:FAULT:WORDS` one of rank 1 only.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

import ttrace
from tests.support.faulty_machine.faults import FAULTS

NUM_STEPS = 3
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RANK = os.environ.get("RANK", "0")
RULES = {
    "*/param*": "...",
    "*/optim*": "...",
    "*/input": "batch/dp ...",
    "*/output": "batch/dp ...",
    "*/grad_*": "batch/dp ...",
}


def reach(moment: str) -> None:
    """Have the faults of this moment happen."""
    for argument in sys.argv[1:]:
        rank, _, fault = argument.rpartition("@")
        if rank in ("", RANK) and fault.split(":")[0] == moment:
            _, name, *words = fault.split(":")
            FAULTS[name](*words)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()))
    return found.hexdigest()[:16]


def tell(words: str) -> None:
    """Print a line, unless the script has closed its standard output."""
    try:
        os.write(1, f"{words}\n".encode())
    except OSError:
        with open(os.environ["FAULTS_BITS"], "a") as file:  # noqa: PTH123
            file.write(f"{words}\n")


def train() -> None:
    reach("start")
    if NUM_RANKS > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if "watch" in sys.argv:
        ttrace.watch(model, optimizer, out="watched", trace=ttrace.TraceSchedule(wait=1, active=1))
    session = ttrace.attach(model, optimizer, mesh={"dp": NUM_RANKS}, grad_factor=1 / NUM_RANKS, rules=RULES)
    reach("attached")
    for step in range(NUM_STEPS):
        with session.step():
            optimizer.zero_grad()
            reach(f"begin{step}")
            x = torch.randn(8, 32).chunk(NUM_RANKS)[int(RANK)]
            loss = nn.functional.mse_loss(model(x), x.flip(1))
            reach(f"forward{step}")
            loss.backward()
            for parameter in model.parameters() if NUM_RANKS > 1 else ():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(NUM_RANKS)
            optimizer.step()
            state = [value for each in optimizer.state.values() for value in each.values()]
            bits = digest([loss, *model.parameters(), *state, torch.get_rng_state()])
            tell(f"rank {os.environ.get('RANK', '0')} step {step} bits {bits}")
            reach(f"updated{step}")
        reach(f"stepped{step}")
    tell(f"rank {RANK} ended")


if __name__ == "__main__":
    train()
