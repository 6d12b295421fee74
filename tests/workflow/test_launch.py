"""A command that hangs is ended with a message that says where each rank is, and what it communicated last."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import ttrace

SECONDS = 25
SCRIPT = """
import os, time
import torch, torch.distributed as dist, torch.nn as nn
import ttrace

is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
if is_distributed:
    dist.init_process_group("gloo")

class Waits(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if is_distributed:
            dist.all_reduce(y.detach())
            if dist.get_rank() == 0:
                dist.all_reduce(y.detach(), op=dist.ReduceOp.MAX)  # nobody else does
            else:
                time.sleep(1000)
        return y

model = nn.Sequential(Waits(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ttrace.attach(model, optimizer, mesh="dp=2" if is_distributed else "dp=1")
with session.step():
    model(session.batch(torch.randn(2, 4))).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_the_place_and_the_last_collective_of_each_rank_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    lines = SCRIPT.splitlines()
    line = {
        text: next(i for i, each in enumerate(lines, 1) if text in each) for text in ("MAX", "sleep", "y.detach())")
    }
    done = ttrace(
        "run",
        *("--reference", "python train.py", "--candidate", "torchrun --standalone --nproc-per-node 2 train.py"),
        *("--out", "run", "--timeout", str(SECONDS)),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    words = " ".join(done.stderr.split())
    assert f"did not end within {SECONDS} s" in words
    assert (
        f"Rank 0 is at train.py:{line['MAX']} in forward; its last collective, number 2, is all_reduce (max) over dp"
        in words
    )
    assert (
        f"Rank 1 is at train.py:{line['sleep']} in forward; its last collective, number 1, is all_reduce (sum)" in words
    )
    assert "in the forward of 0" in words
