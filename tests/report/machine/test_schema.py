"""The published schema is what reports keep to. `TTRACE_SHOTS=1` writes it anew."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.support.traces import Case, draw_tensor
from ttrace.report.machine import json_report
from ttrace.report.refusal import make_failure_report

FILE = Path(__file__).parents[3] / "docs" / "reference" / "report.schema.json"
REPORT = TypeAdapter(json_report.Report)


def test_the_published_schema_is_that_of_the_code() -> None:
    if os.environ.get("TTRACE_SHOTS"):
        FILE.write_text(json.dumps(json_report.build_schema(), indent=2) + "\n")
    assert json.loads(FILE.read_text()) == json_report.build_schema()


def test_reports_keep_to_it(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b/tp", lambda x: 2 * x)
    case.add_trusted("0/0/gone/output", draw_tensor(4, 8))
    for report in (json_report.as_json(case.judge(), "next"), make_failure_report("why")):
        REPORT.validate_json(json.dumps(report), strict=True)
        for key in report:
            with pytest.raises(ValidationError):
                REPORT.validate_python({name: value for name, value in report.items() if name != key})
        with pytest.raises(ValidationError):
            REPORT.validate_python({**report, "more": 1})
