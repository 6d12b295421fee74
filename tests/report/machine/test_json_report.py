"""What a program reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.judgements import large
from tests.support.traces import Case, draw_tensor
from ttrace.judge.tensors.difference import find_difference
from ttrace.judge.verdict import Verdict
from ttrace.layouts.ids import TensorId
from ttrace.report.machine import json_report
from ttrace.report.terminal import difference as difference_report


def through_json(value: Any) -> Any:
    """Written and read back as strict JSON: no NaN, no Infinity."""
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.fixture
def report(tmp_path: Path) -> Any:
    case = Case(tmp_path, notes=("a note",))
    case.add_right("0/0/a/output")
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b/tp", lambda x: 2 * x)
    case.add_trusted("0/0/gone/output", draw_tensor(4, 8))
    return through_json(json_report.as_json(case.judge(), "ttrace show runs/a"))


def test_the_report_has_everything_a_program_needs(report: Any) -> None:
    assert set(report) == {"schema", "exit", "counts", "findings", "problems", "notes", "reach", "next", "tensors"}
    assert (report["schema"], report["exit"], report["next"]) == (1, 1, "ttrace show runs/a")
    assert report["counts"] == {"PASS": 1, "FAIL": 1, "CONFLICT": 0, "GAP": 0, "MISSING": 1, "UNJUDGED": 0}
    assert set(report["counts"]) == {str(verdict) for verdict in Verdict}
    assert report["notes"] == ["a note"]
    assert report["reach"] == {"error": None, "weak": {}, "untested": []}
    assert [tensor["verdict"] for tensor in report["tensors"]] == ["PASS", "FAIL", "MISSING"]


def test_a_finding_names_module_kind_source_cause_and_axis(report: Any) -> None:
    (finding,) = report["findings"]
    assert finding["id"] == "0/0/fc/output"
    assert (finding["module"], finding["kind"], finding["source"]) == ("fc", "output", "model.py:1")
    assert (finding["cause"], finding["axis"]) == ("double reduction", "tp")
    assert finding["error"] == 1.0
    assert 0 < finding["tolerance"] < 1e-4
    assert finding["num_after"] == 0


def test_a_report_says_what_the_check_could_have_found() -> None:
    report = through_json(json_report.as_json(large(4, 2), ""))
    assert report["reach"] == {
        "error": 2.1e-6,
        "weak": {"layers.3.attn.key.bias": "no gradient"},
        "untested": ["later steps", "no clipping", "ignored labels", "own data"],
    }


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_json_cannot_hold_are_null(tmp_path: Path, bad: float) -> None:
    case = Case(tmp_path)
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b/tp", lambda x: torch.full_like(x, bad))
    report = through_json(json_report.as_json(case.judge(), ""))
    assert report["findings"][0]["error"] is None
    assert report["tensors"][0]["error"] is None


def test_a_zero_reference_has_no_scale(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add("0/0/fc/output", torch.zeros(4, 8), "a b/tp")
    report = through_json(json_report.as_json(case.judge(), ""))
    assert (report["tensors"][0]["scale"], report["tensors"][0]["error"]) == (None, 0.0)


def test_an_empty_judgement_is_valid_too(tmp_path: Path) -> None:
    report = through_json(json_report.as_json(Case(tmp_path).judge(), "x"))
    assert (report["exit"], report["findings"], report["tensors"]) == (2, [], [])


@pytest.mark.parametrize("bad", [1.0, torch.nan, torch.inf])
def test_a_difference_is_valid_json(tmp_path: Path, bad: float) -> None:
    case = Case(tmp_path)
    case.add("0/0/fc/output", draw_tensor(4, 8), "a/tp b", lambda x: x.index_fill(0, torch.tensor([3]), bad))
    traces = case.reference.close(), case.candidate.close()
    report = through_json(difference_report.as_json(find_difference(*traces, TensorId.parse("0/0/fc/output"))))
    assert [rank["where"] for rank in report["ranks"]] == ["rank 0 (tp0)", "rank 1 (tp1)"]
    assert report["elements"][0]["index"][0] == 3
    assert (report["shape"], report["factor"]) == ([4, 8], 1.0)
