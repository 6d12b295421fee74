"""Yesterday's run as the reference: two runs of one layout, `git bisect run`, and a bundle to send to others."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.support.commands import ROOT, SCRIPTS, ttrace
from tests.support.pages import blocks
from zoo.harness.limits import HANG

SCRIPT = """
import torch, ttrace
from factor import FACTOR
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ttrace.attach(model, optimizer)
for _ in range(8):
    with session.step():
        (model(session.batch(torch.randn(4, 8))).square().mean() * FACTOR).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def git(folder: Path, *args: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *who, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_bisection() -> str:
    """Read the shell commands of the page that find a commit."""
    (text,) = (block.text for block in blocks(ROOT / "docs" / "howto" / "upgrades.md") if "git bisect" in block.text)
    return text


@pytest.mark.parametrize(("code", "bisected"), [(0, 0), (1, 1), (2, 125), (77, 125), (143, 125), (None, 125)])
def test_other_exit_codes_than_0_and_1_leave_a_commit_out(tmp_path: Path, code: int | None, bisected: int) -> None:
    """None: the command does not exist."""
    if code is not None:
        (tmp_path / "ttrace").write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / "ttrace").chmod(0o755)
    command = read_bisection().partition("git bisect run ")[2]
    environment = {"PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    assert subprocess.run(["sh", "-c", command], env=environment, timeout=HANG, check=False).returncode == bisected


@pytest.mark.slow
def test_git_bisect_finds_the_commit_that_changed_the_gradients(tmp_path: Path) -> None:
    """The reference is the first commit, in a worktree of its own; one commit between does not run at all."""
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "-q")
    (repository / "train.py").write_text(SCRIPT)
    factors = ["1.0", "1.0  # a comment", "1.0 +", "1", "0.999", "0.999  # another"]
    for number, factor in enumerate(factors):
        (repository / "factor.py").write_text(f"FACTOR = {factor}\n")
        git(repository, "add", ".")
        git(repository, "commit", "-q", "-m", f"commit {number}")
        if number == 0:
            git(repository, "tag", "v1.4")
    commands = read_bisection().replace("torchrun --nproc-per-node 2", "python")
    environment = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-ec", commands],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is the first bad commit" in done.stdout
    assert "commit 4" in done.stdout


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_two_runs_of_one_layout_are_compared_rank_by_rank(tmp_path: Path) -> None:
    """Also what nobody stated a layout for."""
    script = f"torchrun --standalone --nproc-per-node 2 {ROOT}/examples/dtensor_tp.py"
    options = ("--twins", "2", "--no-repeat", "--no-isolate")
    for flag, code in (("", 0), (" --bug", 1)):
        out = tmp_path / f"run{code}"
        ran = ttrace("run", *options, "--reference", script, "--candidate", script + flag, "--out", str(out))
        assert ran.returncode == code, ran.stdout + ran.stderr
        assert "UNJUDGED" not in ran.stdout
    assert "layers.1.gated/grad_input is the first wrong tensor" in ran.stdout
    packed = ttrace("bundle", str(out))
    assert packed.returncode == 0, packed.stderr
    with zipfile.ZipFile(tmp_path / "run1.zip") as bundle:
        names = bundle.namelist()
    assert {"run1/report.html", "run1/report.json", "run1/candidate/rank-00001/records.jsonl"} <= set(names)
    assert not [name for name in names if name.endswith((".safetensors", ".log"))]


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_the_members_of_a_class_all_agree_with_one_reference(tmp_path: Path) -> None:
    """Ways to run the same iteration are values of one axis."""
    file = tmp_path / "class.toml"
    ways = ("python examples/ddp.py", "torchrun --standalone --nproc-per-node 2 examples/ddp.py")
    file.write_text(f'reference = "python examples/ddp.py"\ncandidate = "{{way}}"\n[axes]\nway = {list(ways)}\n')
    ran = ttrace("sweep", str(file), "--out", str(tmp_path / "class"), "--no-isolate", "--no-repeat")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 cells: 2 passed; 1 reference" in ran.stdout
