"""What was done is not done again, what has changed is, and a run that was cut off goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.commands import HOLDABLE, ROOT, ttrace
from ttrace.capture.plan import Plan
from ttrace.workflow.flow import Commands, Flow
from ttrace.workflow.run import MARK, Run
from zoo.harness.limits import HANG


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(HOLDABLE)
    (tmp_path / "part.py").write_text("SIZE = 16\n")
    return tmp_path


def words(folder: Path, *more: str, reference: str = "", candidate: str = "") -> tuple[str, ...]:
    command = f"python {folder}/train.py"
    return (
        *("run", "--reference", f"{command} {reference}".strip(), "--candidate", f"{command} {candidate}".strip()),
        *("--out", str(folder / "run"), "--twins", "2", "--json", *more),
    )


def kept(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.split(":")[0] for line in done.stderr.splitlines() if ": kept, " in line]


def stamps(folder: Path) -> dict[str, str]:
    marks = sorted((folder / "run").glob("*.done.json"))
    return {mark.name.removesuffix(".done.json"): json.loads(mark.read_text())["stamp"] for mark in marks}


def test_a_run_of_other_commands_is_named_before_it_is_replaced(tmp_path: Path) -> None:
    notes: list[str] = []
    run, plan = Run(tmp_path / "run"), Plan(out=tmp_path / "run")

    def prepare(reference: str) -> None:
        Flow(run, Commands((reference,), ("true",), 1, 60.0), plan, on_note=notes.append).prepare()

    prepare("true")
    prepare("true")
    assert notes == []
    prepare("false")
    assert [f"{run.folder} had a run with another reference: its traces are replaced" in note for note in notes] == [
        True
    ]
    (run.folder / MARK).write_text("damaged")
    prepare("true")
    assert len(notes) == 1


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_only_what_has_changed_is_run_again(scripts: Path) -> None:
    first = ttrace(*words(scripts))
    assert (first.returncode, kept(first)) == (0, []), first.stderr
    made = stamps(scripts)
    assert made.keys() == {"reference", "twin-1", "twin-2", "candidate"}
    assert (scripts / "run" / "reference.log").read_text().count("started") == 1  # twins shared the launch

    again = ttrace(*words(scripts))
    assert kept(again) == ["reference", "candidate"]
    assert stamps(scripts) == made
    assert json.loads(again.stdout) == json.loads(first.stdout)

    few = ("--no-isolate", "--no-repeat")
    other = ttrace(*words(scripts, *few, candidate="wrong"))
    assert (other.returncode, kept(other)) == (1, ["reference"])
    (scripts / "part.py").write_text("SIZE = 12\n")
    changed = ttrace(*words(scripts, *few, candidate="wrong"))
    assert (changed.returncode, kept(changed)) == (1, [])
    made = stamps(scripts)
    assert kept(ttrace(*words(scripts, *few, "--fresh", candidate="wrong"))) == []
    assert not made.items() & stamps(scripts).items()


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_a_script_whose_iterations_differ_gets_a_launch_for_each_twin(scripts: Path) -> None:
    done = ttrace(*words(scripts, reference="changing", candidate="changing"))
    assert done.returncode == 0, done.stdout
    assert "the reference's iterations differ by themselves" in done.stderr
    assert (scripts / "run" / "twin-2.log").exists()


KILLED = [
    ("reference", signal.SIGTERM),
    ("candidate", signal.SIGKILL),
    ("repeat", signal.SIGINT),
    ("isolated/reference", signal.SIGTERM),
    ("isolated/candidate", signal.SIGKILL),
]
"""Stages, and what ends them: SIGKILL hits the command's own process, the others `ttrace` itself."""


@pytest.mark.nightly
def test_a_run_that_is_cut_off_at_every_stage_goes_on_each_time(scripts: Path) -> None:
    command = words(scripts, candidate="wrong")
    for stage, number in KILLED:
        (scripts / "hold").write_text(Path(stage).name)
        (scripts / "run" / f"{stage}.log").unlink(missing_ok=True)
        _kill(command, scripts / "run" / f"{stage}.log", number)
    (scripts / "hold").unlink()
    made = stamps(scripts)
    done = ttrace(*command)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["findings"][0]["alone"] is True
    assert made.items() <= stamps(scripts).items()  # each run went on with what those before it had done


def _kill(command: tuple[str, ...], log: Path, number: signal.Signals) -> None:
    """Run the command until a stage's script waits, and end it there: nothing of it is left."""
    process = subprocess.Popen(
        ["ttrace", *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + HANG
    while not (log.exists() and "waiting" in log.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (supervisor,) = (one for one in children if b"train.py" in Path(f"/proc/{one}/cmdline").read_bytes())
    (child,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    os.kill(int(child) if number is signal.SIGKILL else process.pid, number)
    _, told = process.communicate(timeout=HANG)
    # A script that fails in isolation is a note on what was found, one that fails before it leaves nothing to judge.
    assert process.returncode not in ((0,) if "isolated" in str(log) else (0, 1)), told
    assert "Traceback" not in told
    assert not Path(f"/proc/{child}").exists()
