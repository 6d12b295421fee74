"""Checks of the same 10,000 tensors on every engine; the verdict files must be equal, byte for byte.

Each engine runs the command that users run, from start to end. Then a rank is killed during the check: torchrun reports
the loss, and continues from there when the command is repeated. The bar is on what torchrun takes beyond threads, in
seconds: the start of a job takes the same time for a check of any size.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench._tensors import write_run
from ttrace.workflow.run import Run

NUM_TENSORS, SHAPE, NUM_WORKERS = 10_000, (32, 32), 2
MOST_BEYOND = 60.0
"""The bar: seconds beyond those of threads."""
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_WORKERS))


def command(engine: str, run: Run) -> list[str]:
    launcher = _TORCHRUN if engine == "torchrun" else ()
    workers = () if engine == "torchrun" else ("--workers", str(NUM_WORKERS))
    return [sys.executable, *launcher, "-m", "ttrace", "check", str(run.folder), "--engine", engine, *workers]


def started(engine: str, run: Run) -> subprocess.Popen[str]:
    (run.folder / "report.json").unlink(missing_ok=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command(engine, run), stdout=pipe, stderr=subprocess.STDOUT, text=True, env=variables)


def verdicts(run: Run) -> bytes:
    path = run.folder / "report.json"
    return path.read_bytes() if path.exists() else b""


def descendants(process: int) -> Iterator[int]:
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        yield int(child)
        yield from descendants(int(child))


def killed(process: subprocess.Popen[str], is_victim: Callable[[int], bool], moment: Callable[[], bool]) -> str:
    """Kill one process of a command once it is in the middle of its work; what the command said until it ended."""
    while process.poll() is None:
        try:
            victim = next((each for each in descendants(process.pid) if moment() and is_victim(each)), None)
        except (FileNotFoundError, ProcessLookupError):  # one of them ended while we looked
            continue
        if victim is not None:
            os.kill(victim, signal.SIGKILL)
            return process.communicate(timeout=300)[0]
        time.sleep(0.02)
    raise AssertionError(f"the check ended before anything could be killed: {process.communicate()[0]}")


def title(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")


def times(run: Run) -> tuple[dict[str, float], set[bytes]]:
    seconds, files = {}, set()
    for engine in ("threads", "torchrun"):
        start = time.perf_counter()
        said = started(engine, run).communicate(timeout=300)[0]
        seconds[engine] = time.perf_counter() - start
        files.add(verdicts(run))
        print(f"{engine}: {seconds[engine]:.1f} s", flush=True)
        if not verdicts(run):
            print(said)
    return seconds, files


def rank_killed(run: Run) -> bool:
    """Check that a lost rank is reported, and that the same job then continues from the saved results."""
    kept = f"{run.folder.name}/check-*/rank-*.jsonl"

    def num_kept() -> int:
        return sum(path.read_text().count("\n") for path in run.folder.parent.glob(kept))

    said = killed(started("torchrun", run), lambda p: "--engine torchrun" in title(p), lambda: num_kept() >= 8)
    report = re.search(r"a rank of this check was lost.*?from there", " ".join(said.split()))
    print(f"torchrun, a rank killed: {report[0] if report else said}")
    before = num_kept()
    started("torchrun", run).communicate(timeout=300)
    print(f"torchrun again: continues from {before} lots")
    return bool(report) and before >= 8


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run")
        write_run(run.folder, NUM_TENSORS, SHAPE, wrong=100)
        seconds, files = times(run)
        is_reported = rank_killed(run)
        files.add(verdicts(run))
    beyond = seconds["torchrun"] - seconds["threads"]
    is_same = len(files) == 1 and b"" not in files
    print(
        f"engines: verdict files {'identical' if is_same else 'DIFFER'}, "
        f"a lost rank {'reported' if is_reported else 'NOT reported'}; "
        f"torchrun beyond the {seconds['threads']:.1f} s of threads: {beyond:+.1f} s (bar +{MOST_BEYOND:.0f} s)"
    )
    return int(not (is_same and is_reported and beyond <= MOST_BEYOND))
