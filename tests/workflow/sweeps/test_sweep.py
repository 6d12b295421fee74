"""One reference serves all cells, the condition is told, and a sweep that was cut off goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.commands import HOLDABLE, ROOT, SCRIPTS, ttrace
from ttrace.capture.plan import Plan
from ttrace.errors import TTraceError
from ttrace.workflow.run import Run
from ttrace.workflow.sweeps.sweep import Sweep
from ttrace.workflow.sweeps.sweep_file import Matrix
from zoo.harness.limits import HANG

FILE = """
reference = "{python} {folder}/train.py"
candidate = "{python} {folder}/train.py {{size}} {{wrong}}"

[axes]
size = [1, 2]
wrong = "wrong"

[derived]
ranks = "1"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(HOLDABLE.replace('"wrong" in sys.argv', 'sys.argv[1:] == ["2", "wrong"]'))
    (tmp_path / "part.py").write_text("SIZE = 16\n")
    (tmp_path / "sweep.toml").write_text(FILE.format(python=sys.executable, folder=tmp_path))
    return tmp_path


def words(folder: Path, *more: str) -> tuple[str, ...]:
    some = ("--max-ranks", "2", "--twins", "1", "--no-isolate", "--no-repeat")
    return ("sweep", str(folder / "sweep.toml"), "--out", str(folder / "out"), *some, *more)


def stamps(folder: Path) -> dict[str, str]:
    marks = sorted((folder / "out").glob("*/*/*.done.json"))
    return {str(mark.relative_to(folder)): json.loads(mark.read_text())["stamp"] for mark in marks}


@pytest.mark.nightly
def test_a_sweep_that_is_cut_off_leaves_nothing_running_and_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "hold").write_text("candidate")
    _end_while_two_cells_wait(folder)
    (folder / "hold").unlink()
    made = stamps(folder)
    assert made.keys() == {f"out/references/0/{name}.done.json" for name in ("reference", "twin-1")}

    done = ttrace(*words(folder, "--json", "--junit", str(folder / "junit.xml")))
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert (report["condition"], report["references"]) == ("fails iff size > 1 and wrong", 1)
    assert report["smallest"] == [{"size": 2, "wrong": True}]
    assert [cell["exit"] for cell in report["cells"]] == [0, 0, 0, 1]
    assert report["cells"][3]["first"] == "1.weight/param_grad"
    (suite,) = ElementTree.parse(folder / "junit.xml").getroot()
    assert [case.get("name") for case in suite] == ["size=1", "size=1 wrong", "size=2", "size=2 wrong"]
    assert made.items() <= stamps(folder).items()  # the reference and its twin were kept

    made = stamps(folder)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary.md"))
    again = ttrace(*words(folder))
    assert stamps(folder) == made
    assert again.stdout.splitlines()[0] == "✗ fails iff size > 1 and wrong"
    assert "4 cells: 3 passed, 1 failed; 1 reference" in again.stdout
    cell = folder / "out" / "cells" / "size=2-wrong"
    assert again.stdout.splitlines()[-1] == f"next: ttrace check {cell}"
    assert len(Run(cell).judge().findings) == 1  # a cell is a run
    assert again.stderr.count("::error ") == 1  # of the smallest cell
    assert "`fails iff size > 1 and wrong`" in (folder / "summary.md").read_text()


def _end_while_two_cells_wait(folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    process = subprocess.Popen(
        ["ttrace", *words(folder)], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + HANG
    while sum("waiting" in log.read_text() for log in folder.glob("out/cells/*/candidate.log")) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    threads = Path(f"/proc/{process.pid}/task").glob("*/children")
    children = [child for thread in threads for child in thread.read_text().split()]
    assert len(children) == 2
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in told, told
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


def test_a_folder_that_is_not_ours_is_left_alone(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "thesis.txt").write_text("precious")
    matrix = Matrix.load(folder / "sweep.toml")
    plan = Plan(out=folder / "out")
    with pytest.raises(TTraceError, match="holds no earlier sweep"):
        Sweep(folder / "out", matrix, plan, num_twins=1, max_ranks=1, timeout=1).run()
    assert [path.name for path in (folder / "out").iterdir()] == ["thesis.txt"]
