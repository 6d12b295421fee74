"""What commands print, without running anything."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from typer.testing import CliRunner

from tests.support.traces import Case, drawn
from ttrace.cli import app


def lint(*args: str) -> str:
    done = CliRunner().invoke(app, ["lint", *args])
    assert done.exit_code == 0, done.output
    return done.output


def test_lint_lists_what_nobody_stated_and_suggests_rules_on_request(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    full = drawn(4, 8)
    case.trusted("0/0/fc1/output", full)
    for rank in range(2):
        case.candidate.record(rank, "0/0/fc1/output", full.chunk(2, 1)[rank].contiguous())
    case.right("0/0/fc2/output")
    case.judged()
    assert lint(str(tmp_path)).splitlines() == [
        'fc1/output: inferred "d0 d1/tp"',
        f"next: ttrace lint {tmp_path} --suggest",
    ]
    assert tomllib.loads(lint(str(tmp_path), "--suggest")) == {"layouts": {"fc1/output": "d0 d1/tp"}}
    assert json.loads(lint(str(tmp_path), "--json"))[0]["site"] == "fc1/output"


def test_lint_says_when_everything_is_stated(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    case.right("0/0/fc2/output")
    case.judged()
    assert lint(str(tmp_path)) == "every layout is stated\n"
