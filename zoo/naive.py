"""The usual method for the paper's bug 1, for comparison: train both sides until their loss curves separate.

`python -m zoo.naive N` trains the small transformer for N steps in one process; under torchrun it is tensor-parallel
and has the bug. Both start alike and see the same batches, which can be learned: each word has four that may follow it.
With `ttrace run` the same two commands are a reference and a candidate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ttrace
from zoo.bugs.embedding_mask_rebased import patch
from zoo.harness.candidate import Candidate, loss_of
from zoo.harness.dense import tensor_parallel
from zoo.harness.transformer import Shape, Transformer

SHAPE = Shape()
BATCH = 8
NUM_STEPS = 100
WINDOW = 10
"""Losses are averaged over so many steps, as a curve is smoothed."""
PARTED = 0.03
"""The difference between two curves that is visible, as in the paper."""
NUM_RANKS = 2


@dataclass(frozen=True)
class Cost:
    """The time of both methods until they gave a result; seconds include the start of processes."""

    num_steps: int | None
    """Steps until the curves part; None if they did not in all that were tried."""
    naive_seconds: float
    ttrace_seconds: float
    said: str
    """What `ttrace run` said first."""


def measured() -> Cost:
    """Both ways, one after the other."""
    reference = [sys.executable, "-m", "zoo.naive"]
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    candidate = [sys.executable, "-m", *launcher, "-m", "zoo.naive"]
    sides = ["--reference", " ".join(reference), "--candidate", " ".join(candidate)]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        command = [sys.executable, "-m", "ttrace", "run", *sides, "--out", f"{folder}/runs"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        ours = time.monotonic() - begin
    steps = parted(*(_losses(side, NUM_STEPS) for side in (reference, candidate)))
    begin = time.monotonic()
    for side in (reference, candidate):
        _losses(side, steps or NUM_STEPS)
    return Cost(steps, time.monotonic() - begin, ours, said.splitlines()[0])


def parted(ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    """Return the step after which two smoothed curves first differ visibly."""
    for step in range(WINDOW, len(ours) + 1):
        a, b = (sum(losses[step - WINDOW : step]) for losses in (ours, theirs))
        if abs(b - a) > PARTED * a:
            return step
    return None


def _losses(side: list[str], num_steps: int) -> list[float]:
    output = subprocess.run([*side, str(num_steps)], capture_output=True, text=True, check=True).stdout
    losses: list[float] = json.loads(output.splitlines()[-1])
    return losses


def train(num_steps: int) -> list[float]:
    torch.manual_seed(0)
    following = torch.randint(SHAPE.vocab, (SHAPE.vocab, 4))
    model = Transformer(SHAPE)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)  # as GPTs start; else the first losses are far apart by chance
    is_candidate = "RANK" in os.environ
    if is_candidate:
        dist.init_process_group("gloo")
        tensor_parallel(model, init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = ttrace.attach(model, optimizer)
    if is_candidate:
        patch(Candidate([model], optimizer, lambda _: None))
    losses = []
    draws = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        with session.step():
            batch = session.batch(_batch(following, draws))
            loss = loss_of(model(batch["ids"]), batch["labels"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    if is_candidate:
        dist.destroy_process_group()
    return losses


def _batch(following: torch.Tensor, draws: torch.Generator) -> dict[str, torch.Tensor]:
    words = [torch.randint(SHAPE.vocab, (BATCH,), generator=draws)]
    for _ in range(SHAPE.length):
        words.append(following[words[-1], torch.randint(4, (BATCH,), generator=draws)])
    text = torch.stack(words, 1)
    return {"ids": text[:, :-1], "labels": text[:, 1:]}


if __name__ == "__main__":
    found = train(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(found))
