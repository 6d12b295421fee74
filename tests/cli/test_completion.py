"""What a shell is offered when Tab is pressed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zoo.harness.limits import HANG

# A torch that cannot be imported proves that completion does not wait for it.
ENTRY = "import sys; sys.modules['torch'] = None; sys.argv = ['ttrace']; from ttrace.cli import main; main()"


def complete(shell: str, words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Ask as the shell's own script does."""
    asked = {
        "_TTRACE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    command = [sys.executable, "-c", ENTRY]
    env = {**os.environ, **asked}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=HANG, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with two runs, of which one has a report."""
    for name in ("runs/bug", "runs/clean"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    tensors = [{"id": "0/0/a/output", "verdict": "PASS"}, {"id": "0/0/b/output", "verdict": "FAIL"}]
    (tmp_path / "runs" / "bug" / "report.json").write_text(json.dumps({"tensors": tensors}))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("ttrace de", ["demo"]),
        ("ttrace run --rec", ["--record"]),
        ("ttrace run --record ", ["auto", "full", "sketch"]),
        ("ttrace run --map llama", ["llama-megatron", "llama-torchtitan"]),
        ("ttrace map qwen3-mo", ["qwen3-moe-megatron"]),
        ("ttrace check ru", ["runs/bug", "runs/clean"]),
        ("ttrace check runs/b", ["runs/bug"]),
        ("ttrace explain runs/bug ", ["0/0/b/output", "0/0/a/output"]),
        ("ttrace diff runs/bug 0/0/a", ["0/0/a/output"]),
        ("ttrace diff runs/clean ", []),
        ("ttrace diff nowhere ", []),
        ("ttrace compare ru", []),
    ],
)
def test_bash_is_offered_commands_options_values_runs_and_ids(folder: Path, words: str, offered: list[str]) -> None:
    done = complete("bash", words, folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == offered


def test_zsh_and_fish_are_offered_the_same(folder: Path) -> None:
    assert complete("zsh", "ttrace run --record ", folder).stdout == '_arguments \'*: :(("auto"\n"full"\n"sketch"))\'\n'
    assert complete("fish", "ttrace run --record ", folder).stdout.split() == ["auto", "full", "sketch"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell_can_be_printed(tmp_path: Path, shell: str) -> None:
    env = {**os.environ, "_TTRACE_COMPLETE": f"source_{shell}"}
    command = [sys.executable, "-c", ENTRY]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr
    assert f"_TTRACE_COMPLETE=complete_{shell}" in done.stdout
    assert list(tmp_path.iterdir()) == []
