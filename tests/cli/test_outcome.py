"""Every stage of a run leaves a line with its time."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from ttrace.cli.outcome import StageLines


def lines(output: io.StringIO) -> list[str]:
    return [re.sub(r"[0-9.]+ s", "1 s", line) for line in output.getvalue().splitlines()]


def test_stages_in_a_pipe_are_plain_lines() -> None:
    output = io.StringIO()
    with StageLines(Console(file=output)) as shown:
        shown.on_stage("reference")
        shown.on_stage("twin 1/3")
        shown.on_stage("")
        shown.on_note("a note")
        shown.on_stage("candidate")
    assert lines(output) == ["reference: 1 s", "twin 1/3: 1 s", "a note", "candidate: 1 s"]


def test_a_stage_that_failed_is_told_as_not_finished() -> None:
    output = io.StringIO()
    shown = StageLines(Console(file=output))

    def interrupt() -> None:
        with shown:
            shown.on_stage("candidate")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    first, second = lines(output)
    assert first == "candidate: 1 s, not finished"
    assert second == "interrupted: nothing is left running, and the same command continues from here"


def test_the_line_of_the_stage_that_runs_is_live_on_a_terminal() -> None:
    output = io.StringIO()
    with StageLines(Console(file=output, force_terminal=True, width=80)) as shown:
        shown.on_stage("reference")
        shown.on_stage("candidate")
    assert "reference: " in output.getvalue()
    assert "\x1b[2K" in output.getvalue()  # lines are erased and written again
