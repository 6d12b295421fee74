"""The page for users of Megatron: its three lines are the example's, and its command does what the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from zoo.harness.limits import HANG

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "megatron.md").read_text()
EXAMPLE = (ROOT / "examples" / "megatron_gpt.py").read_text()


def test_the_pages_lines_are_the_examples() -> None:
    [shown] = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
    lines = shown.splitlines()
    assert sum(line.startswith("+") for line in lines) == 3
    assert not any(line.startswith("-") for line in lines)
    script = [line.partition("  # ")[0].strip() for line in EXAMPLE.splitlines()]
    assert [line for line in lines if line[1:].strip() not in script] == []


@pytest.mark.usefixtures("warm_commands")
def test_the_pages_command_finds_nothing(tmp_path: Path) -> None:
    [block] = re.findall(r"```console\n(.*?)```", PAGE, re.S)
    command, *shown = block.strip().splitlines()
    # Where there is no GPU, the script runs inside of what replaces one.
    on_cpu = command.removeprefix("$ ").replace("examples/", "-m zoo.harness.megatron.script examples/")
    words = shlex.split(on_cpu.replace("runs/gpt", str(tmp_path / "gpt")))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "COLUMNS": "100"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=HANG, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert [line for line in shown if line != "..." and line not in printed] == []
