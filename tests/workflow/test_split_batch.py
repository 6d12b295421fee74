"""Ordinary data-parallel scripts need no annotation: the global batch is split over the ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from zoo.harness.limits import HANG

ROOT = Path(__file__).parents[2]


def run(script: str, out: Path, *candidate: str, more: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of a script against itself on two ranks."""
    command = f"torchrun --standalone --nproc-per-node 2 {script} {' '.join(candidate)}"
    done = subprocess.run(
        [
            "ttrace",
            "run",
            "--json",
            "--reference",
            f"python {script}",
            "--candidate",
            command,
            "--out",
            str(out),
            *more,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=HANG,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "tensor", "words"),
    [
        ("ignored", "0/-/3.weight/param_grad", "missing gradient averaging over dp"),
        ("loss", "0/0/./loss", "the candidate is 0.5 x the reference: scaled by 1/dp (dp=2)"),
    ],
)
def test_the_ddp_examples_bugs_are_found_where_they_are(tmp_path: Path, bug: str, tensor: str, words: str) -> None:
    """The clean run and the third bug are docs/howto/ddp.md's, and run with it."""
    code, report = run("examples/ddp.py", tmp_path / "run", "--bug", bug, more=("--twins", "2", "--no-isolate"))
    assert code == 1, report
    assert report["findings"][0]["id"] == tensor
    assert words in report["findings"][0]["sentence"]


RETURNS_LOSS = """
import os, sys
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import ttrace

WORLD, MODE = int(os.environ.get("WORLD_SIZE", "1")), sys.argv[1]
BATCH, SEQ, HIDDEN, VOCAB = 8, 6, 16, 32


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, SEQ, HIDDEN))

    def forward(self, x):
        return self.table * 2.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, HIDDEN), Positions()
        self.mix, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids, labels):
        x = self.words(ids)
        logits = self.head(F.gelu(self.mix(x + self.positions(x))))
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


torch.manual_seed(0)
model = Model()
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ttrace.attach(model, optimizer, rules={"./batch.*": "b/dp ..."} if MODE == "rule" and WORLD > 1 else None)
with session.step():
    rows = BATCH if MODE == "same" else BATCH // WORLD
    batch = session.batch((torch.randint(VOCAB, (rows, SEQ)), torch.randint(VOCAB, (rows, SEQ))))
    model(*batch)["loss"].backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["split", "rule"])
def test_a_model_that_returns_its_loss_passes(tmp_path: Path, mode: str) -> None:
    """With positions that all ranks share, whose gradient each rank has a part of."""
    script = tmp_path / "train.py"
    script.write_text(RETURNS_LOSS)
    code, report = run(f"{script} {mode}", tmp_path / "run", more=("--twins", "1"))
    assert code == 0, report
    assert report["problems"] == []


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_ranks_with_whole_batches_of_their_own_are_told_what_ran_on_both_sides(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RETURNS_LOSS)
    code, report = run(f"{script} same", tmp_path / "run", more=("--twins", "1"))
    assert (code, report["findings"]) == (2, [])
    assert "the reference ran 1 microbatch of 8 rows, the candidate ran 2 microbatches" in report["problems"][0]
