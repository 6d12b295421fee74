"""Traces that somebody made to do harm: each is refused in a sentence, in little time and memory."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_runs import RANK, change_document, write_run
from ttrace.cli.outcome import write
from ttrace.errors import TTraceError
from ttrace.judge.verdict import Exit
from ttrace.trace.seal import seal_line, strip_seal, sum_of
from ttrace.untrusted import LIMITS_VARIABLE
from ttrace.workflow.run import Run

Harm = Callable[[Run], None]
SECONDS, MEGABYTES = 2.0, 256


def change_first_line(run: Run, **changes: Any) -> None:
    """Change the first record of every trace, and all seals above it."""
    for folder in run.folder.glob(f"*/{RANK}"):
        _change_first_line(folder, changes)


def _change_first_line(folder: Path, changes: dict[str, Any]) -> None:
    records = folder / "records.jsonl"
    first, *others = records.read_text().splitlines()
    entry = {**json.loads(strip_seal(first)), **changes}
    records.write_text("".join(f"{line}\n" for line in (seal_line(json.dumps(entry, separators=(",", ":"))), *others)))
    change_document(folder / "end.json", records_sum=sum_of(records.read_bytes()))


def in_manifest(**changes: Any) -> Harm:
    def do(run: Run) -> None:
        for path in run.candidate.glob("rank-*/manifest.json"):
            change_document(path, **changes)

    return do


def in_end(**changes: Any) -> Harm:
    return lambda run: change_document(run.candidate / RANK / "end.json", **changes)


def in_line(**changes: Any) -> Harm:
    return lambda run: change_first_line(run, **changes)


def replace_by_pipe(name: str) -> Harm:
    def do(run: Run) -> None:
        (run.candidate / RANK / name).unlink()
        os.mkfifo(run.candidate / RANK / name)

    return do


def link(name: str, target: str) -> Harm:
    def do(run: Run) -> None:
        (run.candidate / RANK / name).unlink()
        (run.candidate / RANK / name).symlink_to(target)

    return do


def link_trace_away(run: Run) -> None:
    run.candidate.rename(run.folder.parent / "elsewhere")
    run.candidate.symlink_to(run.folder.parent / "elsewhere", target_is_directory=True)


def link_rank_away(run: Run) -> None:
    (run.candidate / RANK).rename(run.folder.parent / RANK)
    (run.candidate / RANK).symlink_to(run.folder.parent / RANK, target_is_directory=True)


NORMAL = {"kind": "Normal", "mean": 0.0, "std": 1.0}
HARMS: dict[str, tuple[Harm, str]] = {
    "10^12 ranks": (in_manifest(mesh="tp=1000000 dp=1000000", num_ranks=10**12), "its number of ranks is"),
    "10^6 ranks that are not there": (
        in_manifest(mesh="tp=1000000", num_ranks=10**6),
        "rank 2 of 1000000 left no trace",
    ),
    "ranks that the mesh does not have": (
        in_manifest(num_ranks=3),
        "the mesh 'tp=2' with 2 ranks, but states that there are 3",
    ),
    "a seed of 300 digits": (in_manifest(seed=10**300), "manifest.json is damaged"),
    "a seed of 1,000 digits": (in_manifest(seed=10**1000), "a number has 1001 digits"),
    "lists in lists": (in_manifest(notes=json.loads("[" * 200 + "]" * 200)), "its depth is 101"),
    "10^12 generated elements": (
        in_line(shape=[10**12], region={"shape": [10**12]}, at=[0, 0, 0], values=NORMAL),
        "GiB of memory is free",
    ),
    "bytes between two numbers": (in_line(at=[0, 8193, 8705]), "not a multiple of 8"),
    "a pipe for a manifest": (replace_by_pipe("manifest.json"), "is no regular file"),
    "a pipe for records": (replace_by_pipe("records.jsonl"), "is no regular file"),
    "a pipe for a chunk": (replace_by_pipe("chunk-0000.safetensors"), "is no regular file"),
    "a device for an end": (link("end.json", "/dev/zero"), "outside of"),
    "a link to a file of ours": (link("records.jsonl", "/etc/hostname"), "outside of"),
    "a link for a trace": (link_trace_away, "Links out of a run are not followed"),
    "a link for a rank": (link_rank_away, "Links out of a run are not followed"),
    "a factor that is no number": (in_end(grad_factor=float("nan")), "must be a finite number"),
}


@pytest.mark.parametrize(("harm", "sentence"), HARMS.values(), ids=HARMS.keys())
def test_it_is_refused_in_little_time_and_memory(tmp_path: Path, harm: Harm, sentence: str) -> None:
    run = write_run(tmp_path / "run", wrong=False)
    assert run.judge().exit is Exit.PASSED
    harm(run)
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sentence in judge_in_words(run)
    assert time.process_time() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES << 10


def judge_in_words(run: Run) -> str:
    """What a check says that does not judge."""
    try:
        found = run.judge()
    except TTraceError as error:
        return str(error)
    assert found.exit is Exit.UNJUDGED
    return "\n".join(found.problems)


def test_a_report_replaces_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", wrong=False)
    ours = tmp_path / "ours"
    ours.write_text("precious")
    for name in ("report.html", "report.json"):
        (run.folder / name).symlink_to(ours)
    write(run, run.judge())
    assert ours.read_text() == "precious"
    assert not any((run.folder / name).is_symlink() for name in ("report.html", "report.json"))


def test_limits_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", wrong=False)
    in_manifest(notes=["x" * 400] * 3, seed=0)(run)
    change_document(run.folder / "run.json", deep=json.loads("[" * 150 + "]" * 150))
    with pytest.raises(TTraceError, match=r"its depth is 101, but at most 100 is read.*--limits 10"):
        run.judge()
    monkeypatch.setenv(LIMITS_VARIABLE, "10")
    assert run.judge().exit is Exit.PASSED
    monkeypatch.setenv(LIMITS_VARIABLE, "many")
    with pytest.raises(TTraceError, match="it must be a whole number"):
        run.judge()
