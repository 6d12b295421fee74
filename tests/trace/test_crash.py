"""A writer that is killed at any moment leaves a trace that is good as far as it goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.support.rank_traces import same_bits
from tests.support.writers_to_kill import NUM_KILLS, expected
from ttrace.errors import TraceError
from ttrace.trace.reader import Trace
from zoo.harness.limits import HANG

NUM_ROUNDS = 8
"""One is enough, unless the machine is so busy that kills come late and find complete traces."""


def check_what_is_left(folder: Path, num_records: int, largest: int) -> str:
    """Everything that is listed is right, and what is not there is said; the state in a word."""
    rank = folder / "rank-00000"
    if not (rank / "manifest.json").exists():
        with pytest.raises(TraceError, match="holds no trace"):
            Trace(folder)
        return "no manifest"
    trace = Trace(folder)
    complete, problems = (rank / "end.json").exists(), list(trace.problems())
    for i, record in enumerate(trace.ranks[0].records):
        wanted, tensor = expected(i, largest)
        assert (record.id, record.region, record.order, record.values) == (wanted.id, wanted.region, i, wanted.values)
        assert same_bits(trace.ranks[0].read_stored(record), tensor), f"{folder}: {record.id}"
    found = len(trace.ranks[0].records)
    check_closed_chunks(rank, complete=complete)
    if complete:
        assert (found, problems) == (num_records, [])
        return "complete"
    assert problems == [f"{rank} is incomplete: {found} records, then the run ended without closing it"]
    return "all records, no end" if found == num_records else "in the middle" if found else "no records"


def check_closed_chunks(rank: Path, *, complete: bool) -> None:
    """Every chunk that was closed opens with safetensors: all but the last, and the last of a complete trace."""
    chunks = sorted(rank.glob("chunk-*"))
    for chunk in chunks if complete else chunks[:-1]:
        with safe_open(chunk, framework="pt") as file:
            assert any("/" in name for name in file.keys())  # noqa: SIM118  # no mapping


def killed_writers(folder: Path, seed: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.writers_to_kill", str(folder), str(seed)]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=HANG, cwd=Path(__file__).parents[2]
    ).stdout
    kills = [json.loads(line) for line in output.splitlines()]
    assert len(kills) == NUM_KILLS
    return kills


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its writers")
def test_a_writer_killed_at_any_moment_leaves_a_good_trace(tmp_path: Path) -> None:
    states: Counter[str] = Counter()
    num_chunks: list[int] = []
    for seed in range(NUM_ROUNDS):
        for kill in killed_writers(tmp_path / str(seed), seed):
            num_records, largest, *_ = kill["size"]
            states[check_what_is_left(Path(kill["folder"]), num_records, largest)] += 1
            num_chunks.append(len(list(Path(kill["folder"]).rglob("chunk-*"))))
        if states["in the middle"] >= NUM_KILLS * 0.4:
            break
    # The kills really fell into different states, of small traces and of many chunks.
    assert states["no manifest"] + states["no records"] >= 2, states
    assert states["in the middle"] >= 20, states
    assert states["complete"] >= 3, states
    assert 1 in num_chunks
    assert max(num_chunks) > 5
