"""A process that outlived its launch writes nothing into the trace of the next one, and mixed traces are no verdict."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.rank_traces import manifest, record_of
from tests.support.traces import Case
from ttrace.capture.plan import Plan, claim_of
from ttrace.errors import CaptureError, TraceError
from ttrace.trace.format import End
from ttrace.trace.reader import Trace
from ttrace.trace.writer import Writer
from ttrace.workflow.run import Run
from ttrace.workflow.stages import Stage
from zoo.harness.limits import HANG

FIRST, SECOND = "1" * 32, "2" * 32
SCRIPT = """
import os, pathlib, sys, time, torch, ttrace
model = torch.nn.Linear(4, 4)
session = ttrace.attach(model)
with session.step():
    model(session.batch(torch.randn(2, 4))).sum().backward()
    print("pid", os.getpid(), flush=True)
    while sys.argv[1:] and not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.05)
"""
LAUNCHER = """
import sys
from pathlib import Path
from ttrace.capture.plan import Plan
from ttrace.workflow.stages import Stage
Stage(tuple(sys.argv[2:]), Plan(out=Path(sys.argv[1]))).run(timeout=1800)
"""


def test_a_plan_that_was_replaced_is_refused(tmp_path: Path) -> None:
    plan = Plan(out=tmp_path / "trace", launch=FIRST)
    plan.save(tmp_path / "plan.json")
    address = plan.address(tmp_path / "plan.json")
    assert Plan.find(address) == plan
    assert Plan.find(str(tmp_path / "plan.json")) == plan
    plan.model_copy(update={"launch": SECOND}).save(tmp_path / "plan.json")
    with pytest.raises(CaptureError, match="the plan of a later launch"):
        Plan.find(address)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_writer_touches_nothing_that_a_later_launch_has_taken(tmp_path: Path) -> None:
    out = tmp_path / "trace"
    claim = claim_of(out)
    claim.write_text(FIRST)
    ours = manifest().model_copy(update={"launch": FIRST})
    orphan = Writer(out, ours, claim=claim, chunk_bytes=1)
    orphan.write(record_of("a", torch.ones(4)), torch.ones(4))

    claim.write_text(SECOND)
    theirs = Writer(out, manifest().model_copy(update={"launch": SECOND}), claim=claim)
    theirs.write(record_of("b", torch.ones(4)), torch.ones(4))
    theirs.close(End(num_steps=1))
    before = files(tmp_path)
    with pytest.raises(TraceError, match="belongs to a later launch"):
        Writer(out, ours, claim=claim)
    with pytest.raises(TraceError, match="belongs to a later launch"):
        orphan.write(record_of("c", torch.ones(4)), torch.ones(4))  # into a chunk of its own
    with pytest.raises(TraceError, match="belongs to a later launch"):
        orphan.close(End(num_steps=1))
    assert files(tmp_path) == before
    assert Trace(out).launch == SECOND


def write_ranks(out: Path, launch: str, num_ranks: int = 2) -> None:
    for rank in range(num_ranks):
        stated = manifest(rank, num_ranks, mesh=f"tp={num_ranks}" if num_ranks > 1 else "")
        Writer(out, stated.model_copy(update={"launch": launch})).close(End(num_steps=1))


@pytest.mark.parametrize("file", ["manifest.json", "end.json"])
def test_ranks_of_two_launches_are_not_judged(tmp_path: Path, file: str) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    case.judge()
    assert Run(tmp_path).judge().exit == 0
    write_ranks(tmp_path / "candidate", FIRST)
    write_ranks(tmp_path / "other", SECOND)
    rank = Path("rank-00001")
    shutil.copy(tmp_path / "other" / rank / file, tmp_path / "candidate" / rank / file)
    with pytest.raises(TraceError, match=r"candidate/rank-00001 and .* were written by different launches"):
        Run(tmp_path).judge()


def test_a_trace_that_was_replaced_after_it_was_marked_is_not_judged_and_made_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    stage = Stage((sys.executable, str(tmp_path / "script.py")), Plan(out=tmp_path / "candidate"))
    launch = stage.run(timeout=HANG).launch
    assert len(launch) == 32
    assert launch == claim_of(tmp_path / "candidate").read_text()
    assert stage.is_done()
    assert stage.is_complete()
    write_ranks(tmp_path / "candidate", SECOND, 1)
    assert not stage.is_complete()
    case = Case(tmp_path)
    case.reference.close()
    case.twin.close()
    with pytest.raises(TraceError, match="candidate was replaced by another launch"):
        Run(tmp_path).judge()


@pytest.mark.slow
def test_an_orphan_that_nothing_could_end_leaves_the_next_trace_alone(tmp_path: Path) -> None:
    """Both `ttrace` and its supervisor are killed, and the orphan is below neither."""
    script, log, release = tmp_path / "script.py", tmp_path / "orphan.log", tmp_path / "release"
    script.write_text(SCRIPT)
    orphaned = f"setsid {sys.executable} {script} {release} > {log} 2>&1 & wait"
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, tmp_path / "trace", "bash", "-c", orphaned])
    try:
        deadline = time.monotonic() + HANG
        while not (log.exists() and "pid" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (supervisor,) = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        launcher.send_signal(signal.SIGSTOP)  # or it would end what its supervisor left
        os.kill(int(supervisor), signal.SIGKILL)
    finally:
        launcher.kill()
        launcher.wait(HANG)
    orphan = Path("/proc") / log.read_text().split()[1]
    assert orphan.exists()
    launch = Stage((sys.executable, str(script)), Plan(out=tmp_path / "trace")).run(timeout=HANG).launch
    before = files(tmp_path / "trace")
    release.touch()
    deadline = time.monotonic() + HANG
    while orphan.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "trace belongs to a later launch" in log.read_text()
    assert files(tmp_path / "trace") == before
    assert Trace(tmp_path / "trace").launch == launch
