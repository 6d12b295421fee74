"""Start of a session: what a script and the command line declare."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttrace.capture.plan import Plan
from ttrace.capture.start import Declarations
from ttrace.errors import CaptureError
from ttrace.layouts.rules import Rules

OF_SCRIPT, OF_COMMAND = {"*.fc1/output": "seq hidden/tp"}, {"*.fc1/output": "seq/tp hidden"}


def test_rules_of_the_command_line_are_taken_where_the_script_states_none(tmp_path: Path) -> None:
    plan = Plan(out=tmp_path, rules=OF_COMMAND)
    declared = Declarations().or_planned(plan)
    assert [str(rule.layout) for rule in declared.rules.rules] == list(OF_COMMAND.values())


def test_rules_of_the_script_and_of_the_command_line_are_refused(tmp_path: Path) -> None:
    declared = Declarations(rules=Rules.of(OF_SCRIPT))
    assert declared.or_planned(Plan(out=tmp_path)).rules is declared.rules
    with pytest.raises(CaptureError, match=r"the command line \(--rules\).*Leave one of them out"):
        declared.or_planned(Plan(out=tmp_path, rules=OF_COMMAND))
