"""This module measures what the ledger of collectives costs: the time per collective, times their number in a step.

The step is that of `bench overhead`'s model on four ranks, with tensor parallelism and FSDP2 of 2. A collective costs
the CPU time of the thread that issues it, with the ledger and without, alternating in random order; medians.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bench._training import BATCH, SEQ, VOCAB, Block, gpt
from ttrace.adapters.native.adapter import Native
from ttrace.capture.observe.events import StepCounter
from ttrace.capture.observe.ledger import Ledger
from ttrace.capture.observe.torch_patches import patch_torch
from ttrace.capture.plan import Plan
from ttrace.trace.format import Manifest
from ttrace.trace.writer import Writer
from zoo.harness.ledgers import LedgerEvents
from zoo.harness.ranks import on_ranks

SHARE = 0.01
"""The bar: the ledger's CPU time over that of a bare step."""
RANKS, NUM_STEPS, NUM_CALLS = 4, 5, 400


def measure(folder: Path) -> tuple[float, int, float]:
    """Return the seconds per collective, their number in a step, and the CPU seconds of a bare step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = gpt()
    whole = ColwiseParallel(output_layouts=Replicate())
    for block in model.children():
        if isinstance(block, Block):
            plan = {"qkv": whole, "out": whole, "fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
            fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    bare = statistics.median(_spend(lambda: _step(model)) for _ in range(NUM_STEPS))
    num = 0
    writer = Writer(folder, Manifest(role="candidate", rank=dist.get_rank(), num_ranks=RANKS, mesh="dp=2 tp=2", seed=0))

    def append(line: str) -> None:
        nonlocal num
        num += 1
        writer.write_collective(line)

    clock = StepCounter()
    names = list(model.named_modules())[1:]
    made = Plan(out=folder, role="candidate")
    ledger = Ledger(made, Native([model], mesh=mesh), clock, names, append)
    with clock.running(), patch_torch(LedgerEvents(ledger)):
        _step(model)
    in_step = num
    small, group = torch.ones(8), mesh["tp"].get_group()
    costs: dict[bool, list[float]] = {True: [], False: []}
    chance = random.Random(0)
    for _ in range(NUM_CALLS // 20):
        for is_kept in chance.sample((True, False), 2):
            if is_kept:
                with clock.running(), patch_torch(LedgerEvents(ledger)):
                    costs[True] += [_spend(lambda: dist.all_reduce(small, group=group)) for _ in range(20)]
            else:
                costs[False] += [_spend(lambda: dist.all_reduce(small, group=group)) for _ in range(20)]
    ledger.remove()
    return statistics.median(costs[True]) - statistics.median(costs[False]), in_step, bare


def _step(model: nn.Module) -> None:
    ids, labels = torch.randint(VOCAB, (2, BATCH, SEQ))
    F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()


def _spend(run: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(RANKS, measure, Path(folder))
    each = max(seconds for seconds, _, _ in found)
    num, bare = max(num for _, num, _ in found), min(seconds for _, _, seconds in found)
    share = each * num / bare
    print(
        f"{each * 1e6:.0f} µs x {num} collectives are {share:.2%} of the CPU time of a bare step, {bare * 1e3:.0f} ms "
        f"(bar {SHARE:.0%})"
    )
    return int(share > SHARE)
