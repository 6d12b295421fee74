"""The README's quick start does what the README says, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def console_blocks() -> list[list[str]]:
    text = (ROOT / "README.md").read_text()
    return [block.strip().splitlines() for block in re.findall(r"```console\n(.*?)```", text, re.S)]


def fits(shown: list[str], printed: list[str]) -> bool:
    """Whether the shown lines are printed in this order; `...` stands for any number of lines."""
    rest = iter(printed)
    return all(line == "..." or any(line == found.rstrip() for found in rest) for line in shown)


@pytest.mark.slow
def test_the_quick_start_prints_what_it_shows(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
    blocks = console_blocks()
    assert blocks[0] == ["$ pip install ."]
    for first, *shown in blocks[1:]:
        command = shlex.split(first.removeprefix("$ "))
        assert command[0] == "ttrace"
        start = time.monotonic()
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert time.monotonic() - start < 60
        assert done.returncode == (1 if "--bug" in first else 0), done.stdout + done.stderr
        assert fits(shown, done.stdout.splitlines()), done.stdout
    found = json.loads((tmp_path / "runs" / "bug" / "report.json").read_text())["findings"]
    assert [(f["module"], f["kind"], f["axis"]) for f in found] == [("layers.1.fc1", "grad_input", "tp")]
    assert found[0]["sentence"] == "replicas differ and sum to the reference: missing all-reduce over tp"
