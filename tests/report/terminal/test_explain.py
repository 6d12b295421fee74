"""An explanation fits a screen, and says where to go on."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

from rich.console import Console

from tests.support.traces import Case, TraceBuilder, draw_tensor, nudge
from ttrace.judge.check import judge_candidate
from ttrace.judge.explanation import Explanation, explain
from ttrace.judge.margin import MARGIN
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.tolerance.run_to_run import Noise
from ttrace.judge.verdict import ToleranceRule
from ttrace.layouts.ids import TensorId
from ttrace.report.terminal import explain as report


def explained(folder: Path, name: str) -> Explanation:
    case = Case(folder)
    case.add_right("0/0/emb/output")
    case.add("0/0/fc/output", draw_tensor(8, 12), "a b/tp", lambda x: 2 * x)
    case.add("0/0/./output", draw_tensor(8, 12, seed=3), "a b/tp", lambda x: 2 * x)
    case.add_trusted("0/0/gone/output", draw_tensor(8, 12))
    return explain(case.judge(), case.reference.close(), case.candidate.close(), TensorId.parse(name))


def shown(found: Explanation) -> str:
    file = StringIO()
    report.show(Console(file=file, width=120), found, "runs/bug")
    return file.getvalue()


def test_an_accused_tensor(tmp_path: Path) -> None:
    lines = shown(explained(tmp_path, "0/0/fc/output")).splitlines()
    assert len(lines) <= 24
    assert lines[0] == "0/0/fc/output is FAIL"
    labels = [line[2:13].strip() for line in lines[1:-1]]
    assert [label for label in labels if label] == [
        "error",
        "tolerance",
        "scale",
        "layout",
        "before it",
        "cause",
        "evidence",
    ]
    assert sum(line.endswith("<- decides") for line in lines) == 1
    assert '  layout     "a b/tp", decided by: test rule' in lines
    assert any(
        line.startswith("  before it  PASS     0/0/emb/output") and line.endswith("x its tolerance") for line in lines
    )
    assert lines[-1] == "next: ttrace show runs/bug 0/0/fc/output"


def test_a_tensor_that_follows_from_another_leads_to_it(tmp_path: Path) -> None:
    text = shown(explained(tmp_path, "0/0/./output"))
    assert "none of its own; the first finding is 0/0/fc/output: the candidate is 2 x the reference" in text
    assert text.endswith("next: ttrace explain runs/bug 0/0/fc/output\n")


def test_a_missing_tensor_says_why(tmp_path: Path) -> None:
    text = shown(explained(tmp_path, "0/0/gone/output"))
    assert "reason     the candidate has no such tensor" in text
    assert "next: ttrace show runs/bug 0/0/gone/output" in text


def test_noise_is_shown_with_its_margin_and_for_either_side(tmp_path: Path) -> None:
    """A second run of the reference widens a tolerance as a second run of the candidate does."""
    case, name = Case(tmp_path / "first"), TensorId.parse("0/0/fc/output")
    full = draw_tensor(8, 12)
    case.add(str(name), full, "a b/tp")
    echo = TraceBuilder(tmp_path / "echo", role="echo")
    echo.record_parts(str(name), nudge(full, 1e-7))
    reference, candidate = case.reference.close(), case.candidate.close()
    model = ToleranceModel.measure(reference, [case.twin.close()])
    noise = Noise.between(reference, echo.close(), model, "reference")
    found = explain(judge_candidate(noise.widen(model), candidate), reference, candidate, name)
    value = f"{MARGIN * noise.stats[name].error:.2e}"
    assert f"noise    {value}  4 x the difference between two runs of one side" in shown(found)


def test_every_rule_has_words() -> None:
    assert set(report._RULES) == set(ToleranceRule)


def test_it_is_valid_json(tmp_path: Path) -> None:
    found = json.loads(json.dumps(report.as_json(explained(tmp_path, "0/0/fc/output")), allow_nan=False))
    assert found["verdict"] == "FAIL"
    assert found["cause"] == "double reduction"
    assert max(term["value"] for term in found["terms"] if term["rule"] != "scale") == found["tolerance"]
    assert found["layouts"] == [{"layout": "a b/tp", "by": "test rule", "ranks": [0, 1]}]
    assert [before["verdict"] for before in found["before"]] == ["PASS"]
    json.dumps(report.as_json(explained(tmp_path / "gone", "0/0/gone/output")), allow_nan=False)
