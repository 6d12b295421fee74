"""No accident ends like a finding: what is no verdict is one line and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.traces import Case, draw_tensor
from ttrace.cli import app
from ttrace.errors import TTraceError
from zoo.harness.limits import HANG


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run without findings."""
    case = Case(tmp_path / "run")
    for number in range(40):
        case.add_right(f"0/0/layers.{number}.fc/output")
    case.judge()
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tracebacks go."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def ttrace(*words: str, before: str = "", stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, in which something was prepared."""
    code = f"import sys; sys.argv = ['ttrace', *sys.argv[1:]]; {before}\nfrom ttrace.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG,
        check=False,
    )


BROKEN = "import ttrace.workflow.run as r; r.Run.judge = lambda *_, **__: [][7]"


def test_an_exception_nobody_expected_is_one_line_and_its_traceback_a_file(run: Path) -> None:
    done = ttrace("check", str(run), "--json", before=BROKEN)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "could not judge, because of an unexpected IndexError: list index out of range" in line
    file = Path(line.rpartition(" ")[2])
    assert "Traceback (most recent call last)" in file.read_text()
    report = json.loads(done.stdout)
    assert (report["exit"], report["findings"]) == (2, [])
    assert "IndexError" in report["problems"][0]


def test_a_library_that_cannot_be_imported_is_no_finding(run: Path) -> None:
    done = ttrace("check", str(run), "--json", before="sys.modules['pydantic'] = None")
    assert done.returncode == 2
    assert "pydantic" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_a_torch_that_cannot_be_imported_is_told_in_a_sentence(run: Path, options: tuple[str, ...]) -> None:
    done = ttrace("check", str(run), *options, before="sys.modules['torch'] = None")
    assert done.returncode == 2
    assert done.stderr.startswith("ttrace: torch cannot be imported: ")
    assert "Install PyTorch 2.8 or later in this environment." in done.stderr
    assert not options or "torch" in json.loads(done.stdout)["problems"][0]


def test_nothing_is_said_of_an_absent_numpy(run: Path) -> None:
    done = ttrace("check", str(run), before="sys.modules['numpy'] = None")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("error", ["typer.Abort", "RecursionError"])
def test_other_ways_to_end_are_no_finding(run: Path, error: str) -> None:
    raising = f"import typer, ttrace.workflow.run as r\ndef end(*_, **__): raise {error}\nr.Run.judge = end"
    assert ttrace("check", str(run), before=raising).returncode == 2


@pytest.mark.parametrize("words", [("check",), ("show", "--json")])
def test_a_closed_pipe_is_no_finding(run: Path, words: tuple[str, ...]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = ttrace(words[0], str(run), *words[1:], stdout=theirs)
    os.close(theirs)
    assert done.returncode == 2
    assert "standard output was closed" in done.stderr
    assert "Exception ignored" not in done.stderr


def test_an_option_that_there_is_not_is_no_finding(run: Path) -> None:
    done = ttrace("check", str(run), "--no-such-option")
    assert done.returncode == 2
    assert "No such option" in done.stderr


def fails(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert isinstance(done.exception, TTraceError), repr(done.exception)
    return str(done.exception)


HOSTILE = {
    "not-utf-8": b"a = '\xff\xfe'",
    "deep": b"a = " + b"[" * 50_000,
    "huge-integer": b"a = " + b"9" * 5_000,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_files_that_cannot_be_read_are_named(run: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "hostile.toml"
    file.write_bytes(content)
    assert str(file) in fails("check", str(run), "--rules", str(file))
    assert str(file) in fails("check", str(run), "--allow", str(file))
    assert str(file) in fails("check", str(run), "--baseline", str(file))
    assert str(file) in fails("sweep", str(file), "--out", str(tmp_path / "sweep"))


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"[" * 50_000], ids=["cut", "not-utf-8", "list", "deep"])
def test_a_damaged_run_file_is_named(run: Path, content: bytes) -> None:
    (run / "run.json").write_bytes(content)
    assert f"{run}/run.json is damaged" in fails("check", str(run))


def test_reports_that_cannot_be_written_are_named(run: Path) -> None:
    (run / "report.json").mkdir()
    assert f"{run}/report.json cannot be written" in fails("check", str(run))


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nowhere"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / out
    assert str(folder) in fails("run", "--reference", "true", "--candidate", "true", "--out", str(folder))


def test_links_in_a_circle_do_not_end_a_report(run: Path) -> None:
    (run / "a.plan.json").symlink_to(run / "b.plan.json")
    (run / "b.plan.json").symlink_to(run / "a.plan.json")
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 0, done.output


def test_a_tensor_of_thousands_of_dims_is_shown(tmp_path: Path) -> None:
    case = Case(tmp_path / "run")
    case.add_trusted("0/0/fc/output", draw_tensor(1).view((1,) * 5_000))
    case.add_right("0/0/fc2/output")
    case.judge()
    done = CliRunner().invoke(app, ["show", str(tmp_path / "run"), "0/0/fc/output", "--json"])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_a_job_of_torchrun_leaves_the_exit_code_that_it_cannot_end_with(run: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (*torchrun, "-m", "ttrace", "check", str(run), "--engine", "torchrun")
    passed = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert (passed.returncode, (run / "exit-code").read_text()) == (0, "0\n"), passed.stderr
    (run / "candidate" / "rank-00001" / "end.json").unlink()
    unjudged = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert (unjudged.returncode, (run / "exit-code").read_text()) == (1, "2\n"), unjudged.stderr
    assert f"exit code 2: also in {run / 'exit-code'}, as torchrun ends with 0 or 1 only" in unjudged.stderr
    (run / "candidate" / "rank-00001" / "manifest.json").write_text("{")
    damaged = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert (damaged.returncode, (run / "exit-code").read_text()) == (1, "2\n"), damaged.stderr
