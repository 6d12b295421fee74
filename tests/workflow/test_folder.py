"""How much is to come is said before it comes, and a disk that is too full is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, TINY, script
from ttrace.errors import TTraceError
from ttrace.workflow.folder import DiskSpace


def test_what_is_to_come_is_said() -> None:
    space = DiskSpace(Path("runs/x"), reference=533_000_000, free=73_100_000_000)
    space.check()
    assert str(space) == (
        "the reference's trace takes 533.0 MB; the candidate's takes at least as much, and more where its ranks hold "
        "replicas. Free: 73.1 GB"
    )


@pytest.mark.parametrize(
    ("reference", "free", "is_said"), [(2 * 10**5, 10**6, True), (10**5, 10**9, False), (10**10, 10**13, True)]
)
def test_little_space_on_a_large_disk_is_not_worth_a_line(reference: int, free: int, is_said: bool) -> None:
    assert DiskSpace(Path("runs/x"), reference, free=free).is_noteworthy is is_said


@pytest.mark.parametrize(("free", "fits"), [(999, False), (1000, True)])
def test_a_disk_too_full_is_refused_with_the_next_move(free: int, fits: bool) -> None:
    space = DiskSpace(Path("runs/x"), reference=1000, free=free)
    if fits:
        space.check()
        return
    with pytest.raises(
        TTraceError, match=r"not enough disk space for .*runs/x: .*1\.0 kB.*Record less with --budget, --only or --skip"
    ):
        space.check()


def test_a_trace_is_measured_with_everything_in_it(tmp_path: Path) -> None:
    trace = tmp_path / "reference" / "rank-00000"
    trace.mkdir(parents=True)
    (trace / "chunk-0000.safetensors").write_bytes(bytes(5000))
    (trace / "records.jsonl").write_bytes(bytes(70))
    space = DiskSpace.after(tmp_path / "reference", tmp_path / "not" / "yet" / "there")
    assert space.reference == 5070
    assert space.free > 0


FULL = """
import collections, shutil, sys
usage = collections.namedtuple("usage", "total used free")
shutil.disk_usage = lambda path: usage(10**9, 10**9 - 1000, 1000)
from ttrace.cli import main
main()
"""


def test_a_run_ends_before_the_candidate_if_it_does_not_fit(tmp_path: Path) -> None:
    command, out = script(tmp_path, TINY), tmp_path / "run"
    arguments = ("run", "--reference", command, "--candidate", command, "--out", str(out))
    for program, status in ((FULL, 2), (FULL.replace("1000", "10**8"), 0)):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert (out / "reference").is_dir()
        assert (out / "candidate").is_dir() == (status == 0)
        assert ("the candidate's takes at least as much" in done.stderr) == (status == 2)
        assert ("--only" in done.stderr) == (status == 2)
        assert "as much" not in done.stdout
