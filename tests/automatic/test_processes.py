"""Automatic attachment as users meet it: commands, their environment, and what they print."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import ROOT, script, ttrace
from ttrace.trace.reader import Trace
from zoo.harness.limits import HANG

LOOP = """
import importlib.util, os, subprocess, sys
assert importlib.util.find_spec("torch")  # as libraries do before they import it
import torch
from torch import nn
print("child:", subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout.strip())
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("the end of the script")
"""


@pytest.mark.slow
def test_the_users_own_sitecustomize_and_processes_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own sitecustomize')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'own'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    done = ttrace("trace", "--out", str(tmp_path / "trace"), "--", *script(tmp_path, LOOP).split())
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "trace.log").read_text()
    assert log.count("own sitecustomize") == 2  # the script's and that of its child, on one line with its answer
    assert "42" in log
    assert "the end of the script" not in log
    assert Trace(tmp_path / "trace").manifest.attachment is not None

    bare = subprocess.run(script(tmp_path, LOOP).split(), capture_output=True, text=True, timeout=HANG, check=True)
    assert "the end of the script" in bare.stdout


@pytest.mark.slow
def test_what_prevents_automatic_attachment_is_said(tmp_path: Path) -> None:
    command = script(tmp_path, LOOP)
    for words, sentence in {
        command.replace("python", "python -I", 1): "`python -S`, `-I` and `-E` prevent that",
        command: "does the script call ttrace.attach(model, optimizer)?",
    }.items():
        more = ["--attach", "script"] if words == command else []
        done = ttrace("trace", "--out", str(tmp_path / "trace"), *more, "--", *words.split())
        assert done.returncode == 2
        assert sentence in " ".join(done.stderr.split())

    one_step = script(tmp_path, LOOP.replace("range(3)", "range(1)"))
    done = ttrace("trace", "--out", str(tmp_path / "trace"), "--", *one_step.split())
    assert done.returncode == 2
    assert "the script ended after its first training step" in " ".join(done.stderr.split())

    within = script(tmp_path, LOOP.replace("    optimizer.step()", "    if _ == 1: break\n    optimizer.step()"))
    done = ttrace("trace", "--out", str(tmp_path / "trace"), "--", *within.split())
    assert done.returncode == 2
    assert "never finished the traced steps: the script ended within a traced step" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_script_whose_last_step_is_the_traced_one_ends_in_silence(tmp_path: Path) -> None:
    """The step is ended when the interpreter ends, where nobody can be told to end."""
    two_steps = script(tmp_path, LOOP.replace("range(3)", "range(2)"))
    done = ttrace("trace", "--out", str(tmp_path / "trace"), "--", *two_steps.split())
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "trace.log").read_text()
    assert "the end of the script" in log
    assert "Traceback" not in log
    assert list(Trace(tmp_path / "trace").problems()) == []


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_a_mesh_and_rules_can_be_stated_outside_of_the_script(tmp_path: Path) -> None:
    """The example of hand-written tensor parallelism without its lines for TTrace gives the same finding."""
    source = (ROOT / "examples" / "hidden_allreduce.py").read_text()
    rules = re.search(r"RULES = (\{.*?\})  # \d", source, re.DOTALL)
    assert rules is not None
    table = "".join(f'"{site}" = "{layout}"\n' for site, layout in eval(rules[1]).items())
    (tmp_path / "rules.toml").write_text(f"[layouts]\n{table}")
    lines = [line for line in source.splitlines() if not re.match(r"import ttrace|RULES|session = ", line)]
    body = "\n".join(lines).replace("with session.step():", "if True:").replace("session.batch(", "(")
    assert "session" not in body
    command = script(tmp_path, body)
    path = command.split()[1]
    for flag, exit_code in (("", 0), ("--bug", 1)):
        done = ttrace(
            *("run", "--reference", command, "--twins", "1", "--out", str(tmp_path / f"run{flag}")),
            *("--candidate", f"torchrun --standalone --nproc-per-node 2 {path} {flag}"),
            *("--mesh", "tp=2", "--rules", str(tmp_path / "rules.toml"), "--no-isolate", "--no-repeat"),
        )
        assert done.returncode == exit_code, done.stdout + done.stderr
    assert "missing all-reduce over tp" in done.stdout


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_own_data_is_judged_in_total_if_a_sampler_distributes_it_otherwise(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "unchanged.py").read_text()
    command = script(
        tmp_path, text.replace("DistributedSampler(dataset)", "DistributedSampler(dataset, shuffle=False)")
    )
    path = command.split()[-1]
    for bug, exit_ in (("", 0), ("--bug", 1)):
        done = ttrace(
            *("run", "--data", "own", "--twins", "1", "--no-isolate", "--out", str(tmp_path / "run")),
            *("--reference", command, "--candidate", f"torchrun --standalone --nproc-per-node 2 {path} {bug}"),
        )
        assert done.returncode == exit_, done.stdout
        assert "both sides trained on the same 16 rows" in done.stdout
