"""Two processes do not write into one folder, and a lock ends with its holder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.traces import Case
from ttrace.cli import app
from ttrace.errors import TTraceError
from ttrace.trace.seal import seal_document
from ttrace.workflow.folder import hold, is_empty

HOLDER = """
import sys, time
from pathlib import Path
from ttrace.workflow.folder import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def start_holder(folder: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def complaint(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert isinstance(done.exception, TTraceError), done.output
    return str(done.exception)


def test_who_holds_a_folder_is_told_to_whoever_wants_to_write_into_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    case = Case(run)
    case.add_right("0/0/fc/output")
    case.judge()
    (run / "run.json").write_text(seal_document(json.dumps({"reference": "true"})))
    holder = start_holder(run)
    try:
        for words in (
            ("check", str(run)),
            ("report", str(run)),
            ("run", "--reference", "true", "--candidate", "true", "--out", str(run)),
        ):
            told = complaint(*words)
            assert f"{run} is in use by process {holder.pid} on " in told
            assert " since " in told
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        assert holder.stdout is not None
        holder.stdout.close()
    assert CliRunner().invoke(app, ["check", str(run)]).exit_code == 0


def test_a_sweep_holds_its_cells_which_do_not_hold_each_other(tmp_path: Path) -> None:
    cells = tmp_path / "sweep" / "cells"
    with hold(tmp_path / "sweep"), pytest.raises(TTraceError, match="sweep is in use by process"), hold(cells / "a"):
        pass
    with hold(cells / "a"), hold(cells / "b"):
        with pytest.raises(TTraceError, match="sweep is in use"), hold(tmp_path / "sweep"):
            pass
        with pytest.raises(TTraceError, match=f"a is in use by process {os.getpid()}"), hold(cells / "a"):
            pass


def test_a_folder_with_nothing_but_a_lock_is_empty(tmp_path: Path) -> None:
    with hold(tmp_path / "run"):
        assert is_empty(tmp_path / "run")
    assert is_empty(tmp_path / "nowhere")
    (tmp_path / "run" / "file").touch()
    assert not is_empty(tmp_path / "run")
