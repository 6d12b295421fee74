"""`ttrace demo`, the first command of a new user."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.pages import ROOT, Reader
from ttrace.cli import app
from ttrace.cli.commands.demo import SCRIPT, make_commands, write_script
from ttrace.errors import TTraceError

SHIPPED = ROOT / "src" / "ttrace" / "cli" / "scripts" / SCRIPT


@pytest.mark.slow
def test_the_demo_prints_both_verdicts_and_can_be_repeated(tmp_path: Path) -> None:
    done = Reader(tmp_path).run("ttrace demo")
    assert done.status == 0, done.output
    assert "✓ every tensor agrees with the reference within rounding error" in done.output
    assert "✗ tokens.weight/param_grad is the first wrong tensor  (step 0)" in done.output
    for name, code in (("clean", 0), ("bug", 1)):
        assert (tmp_path / "ttrace-demo" / name / "report.html").exists()
        assert json.loads((tmp_path / "ttrace-demo" / name / "report.json").read_text())["exit"] == code
    [finding] = json.loads((tmp_path / "ttrace-demo" / "bug" / "report.json").read_text())["findings"]
    assert (finding["cause"], finding["axis"]) == ("missing average", "dp")
    commands = [line.removeprefix("$ ") for line in done.output.splitlines() if line.startswith("$ ttrace run")]
    assert Reader(tmp_path).run(commands[1]).status == 1  # into the folder that the demo has made
    assert Reader(tmp_path).run(f"{commands[0]} --json").status == 0
    assert Reader(tmp_path).run("ttrace demo").status == 0


def test_the_script_is_short_and_does_not_mention_ttrace() -> None:
    text = SHIPPED.read_text()
    assert len(text.splitlines()) < 80
    assert "import ttrace" not in text


def test_another_file_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(SCRIPT).write_text("mine")
    done = CliRunner().invoke(app, ["demo"])
    assert isinstance(done.exception, TTraceError)  # exit code 2: tests/test_cli.py
    assert str(done.exception).startswith(f"{SCRIPT} exists here, and is not the demo's script. Move it")
    assert [path.name for path in tmp_path.iterdir()] == [SCRIPT]
    assert Path(SCRIPT).read_text() == "mine"


def test_the_script_of_an_earlier_demo_is_used_again(tmp_path: Path) -> None:
    for _ in range(2):
        write_script(tmp_path / SCRIPT)
        assert (tmp_path / SCRIPT).read_bytes() == SHIPPED.read_bytes()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(TTraceError, match=r"cannot be written: .* Run `ttrace demo` in another folder"):
        write_script(tmp_path / "absent" / SCRIPT)


def test_commands_name_this_python_where_the_shell_finds_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reference, candidate = make_commands()
    assert reference == (sys.executable, SCRIPT)
    assert candidate[:3] == (sys.executable, "-m", "torch.distributed.run")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert make_commands()[0] == ("python", SCRIPT)
