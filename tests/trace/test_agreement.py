"""Ranks that are not of one run are no trace, and the sentence says which rank says what."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_traces import manifest
from ttrace.errors import TraceError
from ttrace.trace.format import End
from ttrace.trace.reader import Trace
from ttrace.trace.writer import Writer


def write_ranks(folder: Path, *changes: dict[str, Any]) -> None:
    """One rank for each change of what all say."""
    for rank, change in enumerate(changes):
        stated = manifest(rank, len(changes), mesh=f"tp={len(changes)}").model_copy(update=change)
        Writer(folder, stated).close(End(num_steps=1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"role": "twin"}, "Rank 1 has role 'twin', but rank 0 has role 'candidate'"),
        ({"mesh": "dp=2"}, "Rank 1 has mesh 'dp=2', but rank 0 has mesh 'tp=2'"),
        ({"seed": 7}, "Rank 1 has seed 7, but rank 0 has seed 0"),
        ({"num_ranks": 4}, "Rank 1 has num_ranks 4, but rank 0 has num_ranks 2"),
        ({"num_microbatches": 3}, "Rank 1 has num_microbatches 3, but rank 0 has num_microbatches 1"),
        ({"isolated": True}, "Rank 1 has isolated True, but rank 0 has isolated False"),
        ({"versions": {"a": "7", "torch": "2.1"}}, "Rank 1 has torch 2.1, but rank 0 has torch 2.2"),
    ],
    ids=lambda change: str(change)[:20],
)
def test_ranks_of_two_runs_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write_ranks(tmp_path, {"versions": {"torch": "2.2", "b": "1"}}, change)
    message = f"{tmp_path}: the ranks belong to different runs. {words}. Trace again."
    with pytest.raises(TraceError, match=f"^{re.escape(message)}$"):
        Trace(tmp_path)


@pytest.mark.parametrize("file", ["manifest.json", "end.json"])
def test_ranks_of_two_launches_are_refused(tmp_path: Path, file: str) -> None:
    for launch in ("a", "b"):
        write_ranks(tmp_path / launch, {"launch": launch}, {"launch": launch})
    shutil.copy(tmp_path / "b" / "rank-00001" / file, tmp_path / "a" / "rank-00001" / file)
    words = f"{tmp_path}/a/rank-00001 and {tmp_path}/a/rank-00000 were written by different launches"
    with pytest.raises(TraceError, match=re.escape(words)):
        Trace(tmp_path / "a")


def test_packages_that_only_one_rank_loaded_are_its_own_affair(tmp_path: Path) -> None:
    write_ranks(tmp_path, {"versions": {"torch": "2.2", "b": "1"}}, {"versions": {"torch": "2.2", "c": "1"}})
    assert len(Trace(tmp_path).ranks) == 2


def test_a_mesh_of_another_size_is_refused(tmp_path: Path) -> None:
    write_ranks(tmp_path, {"mesh": "tp=4"}, {"mesh": "tp=4"})
    with pytest.raises(TraceError, match="rank 0 has the mesh 'tp=4' with 4 ranks, but states that there are 2"):
        Trace(tmp_path)


def test_a_rank_that_the_run_did_not_have_is_refused(tmp_path: Path) -> None:
    write_ranks(tmp_path, {}, {})
    Writer(tmp_path, manifest(2, 2, mesh="tp=2")).close(End(num_steps=1))
    with pytest.raises(TraceError, match="there is a rank 2, but only 2 ranks"):
        Trace(tmp_path)


def test_a_rank_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    write_ranks(tmp_path, {}, {})
    shutil.rmtree(tmp_path / "rank-00000")
    shutil.copytree(tmp_path / "rank-00001", tmp_path / "rank-00000")
    with pytest.raises(TraceError, match="rank-00000 holds the trace of rank 1"):
        Trace(tmp_path)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf, 0.0, -0.5])
def test_a_factor_by_which_nothing_can_be_divided_is_refused(tmp_path: Path, factor: float) -> None:
    Writer(tmp_path, manifest()).close(End(num_steps=1, grad_factor=factor))
    where = f"{tmp_path}/rank-00000/end.json"
    with pytest.raises(
        TraceError, match=re.escape(f"{where} states that the gradient reduction applies the factor {factor}")
    ):
        Trace(tmp_path)
