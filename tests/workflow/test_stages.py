"""A stage is done again as soon as anything that it was made from has changed, on any rank."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.rank_traces import manifest
from ttrace.capture.plan import Plan
from ttrace.errors import TTraceError
from ttrace.trace.format import End
from ttrace.trace.seal import fingerprint_file, read_document
from ttrace.trace.writer import Writer
from ttrace.workflow.stages import Stage, watch_stages
from zoo.harness.limits import HANG


@pytest.fixture
def scripts(tmp_path: Path) -> list[Path]:
    """What all ranks load, and what only the last one does."""
    files = [tmp_path / name for name in ("train.py", "last_stage.py")]
    for file in files:
        file.write_text(f"# {file.name}\n")
    return files


def stage_of_two_ranks(folder: Path, scripts: list[Path]) -> Stage:
    for rank in range(2):
        sources = {str(path): fingerprint_file(path) for path in scripts[: rank + 1]}
        Writer(folder / "candidate", manifest(rank, 2, mesh="pp=2")).close(End(num_steps=1, sources=sources))
    return Stage(("true",), Plan(out=folder / "candidate", role="candidate"))


@pytest.mark.parametrize("is_rank_missing", [False, True])
def test_a_script_without_its_rank_is_told_how_to_get_one(tmp_path: Path, *, is_rank_missing: bool) -> None:
    what = "environment variable RANK expected, but not set" if is_rank_missing else "no such thing"
    (tmp_path / "train.py").write_text(f"raise ValueError('{what}')\n")
    stage = Stage((sys.executable, str(tmp_path / "train.py"), "--lr", "1"), Plan(out=tmp_path / "reference"))
    with pytest.raises(TTraceError, match=what) as raised:
        stage.run(timeout=HANG)
    hint = f"With one rank: torchrun --standalone --nproc-per-node 1 {tmp_path / 'train.py'} --lr 1"
    assert (hint in str(raised.value)) is is_rank_missing


def test_an_edit_of_what_any_rank_imports_makes_the_trace_stale(tmp_path: Path, scripts: list[Path]) -> None:
    stage = stage_of_two_ranks(tmp_path, scripts)
    for script in scripts:
        stage.mark()
        assert stage.is_done()
        script.write_text("# edited\n")
        assert not stage.is_done(), script
        stage = stage_of_two_ranks(tmp_path, scripts)


@pytest.mark.parametrize("word", ['{"lr": ' + "1" * 300 + "}", "a\0b", "."])
def test_words_of_a_command_need_not_be_names_of_files(tmp_path: Path, scripts: list[Path], word: str) -> None:
    stage = stage_of_two_ranks(tmp_path, scripts)
    stage = replace(stage, command=(*stage.command, word))
    stage.mark()
    assert stage.is_done()


def test_a_mark_says_when_and_from_which_commit_its_trace_was_made(
    tmp_path: Path, scripts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "train.py"), (*author, "commit", "-qm", "a")):
        subprocess.run(["git", *words], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    scripts[0].write_text("# edited\n")
    before = datetime.now(UTC).replace(microsecond=0)
    stage_of_two_ranks(tmp_path, scripts).mark()
    mark = read_document(tmp_path / "candidate.done.json")
    assert mark["git"] == f"{head}+"
    assert before <= datetime.fromisoformat(mark["time"]) <= datetime.now(UTC)


def test_a_file_that_two_ranks_see_differently_is_never_what_it_was(tmp_path: Path) -> None:
    for seen in ("here", "gone"):
        script = tmp_path / "train.py"
        script.write_text("# on this host\n")
        for rank in range(2):
            sources = {str(script): fingerprint_file(script) if rank == 0 else "0123456789abcdef"}
            Writer(tmp_path / seen, manifest(rank, 2, mesh="tp=2")).close(End(num_steps=1, sources=sources))
        if seen == "gone":
            script.unlink()
        stage = Stage(("true",), Plan(out=tmp_path / seen, role="candidate"))
        stage.mark()
        assert not stage.is_done()


# Stages of one launch are told as their traces begin.


def begin_trace(out: Path) -> None:
    (out / "rank-00000").mkdir(parents=True)
    (out / "rank-00000" / "manifest.json").touch()


def test_stages_are_told_in_order_as_their_traces_begin(tmp_path: Path) -> None:
    stages = {name: tmp_path / name for name in ("echo", "twin 1/2", "twin 2/2")}
    names: list[str] = []
    with watch_stages(stages, names.append):
        for number, name in enumerate(list(stages)[:2], 1):
            begin_trace(stages[name])
            deadline = time.monotonic() + HANG
            while len(names) < number:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert names == ["echo", "twin 1/2"]
    begin_trace(stages["twin 2/2"])
    time.sleep(0.3)
    assert len(names) == 2  # nobody watches any more
