"""What CI systems read: annotations and summaries of GitHub, JUnit, and a sweep's page and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.traces import Case, draw_tensor
from ttrace.judge.verdict import Exit, Judgement
from ttrace.report import sweep as sweep_report
from ttrace.report.machine import ci
from ttrace.report.sweep import SweepRow, SweepTable
from ttrace.report.terminal.summary import render_text


@pytest.fixture
def judgement(tmp_path: Path) -> Judgement:
    case = Case(tmp_path / "case")
    case.add_right("0/0/a/output")
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b/tp", lambda x: 2 * x)
    found = case.judge()
    (finding,) = found.findings
    return replace(found, findings=(replace(finding, source=str(tmp_path / "sub, dir" / "model.py") + ":12"),))


def test_an_annotation_stands_at_the_modules_line(judgement: Judgement, tmp_path: Path) -> None:
    (line,) = ci.format_errors(judgement.findings, tmp_path)
    assert line.startswith("::error file=sub%2C dir/model.py,line=12,title=ttrace%3A double reduction::fc/output is")
    assert "\n" not in line
    assert "%0Acause the candidate is 2 x the reference" in line
    nowhere = [replace(judgement.findings[0], source="")]
    assert next(ci.format_errors(nowhere, tmp_path)).startswith("::error title=")


def test_the_summary_is_added_to_the_steps(judgement: Judgement, tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    for _ in range(2):
        ci.add_summary(ci.format_summary(judgement, "runs/a"), {"GITHUB_STEP_SUMMARY": str(path)})
    assert path.read_text().count("### ✗ TTrace: `runs/a`") == 2
    assert "**`fc/output`** is the first wrong tensor" in path.read_text()
    ci.add_summary("nobody asked", {})
    assert ci.is_on({"GITHUB_ACTIONS": "true"})
    assert not ci.is_on({})


def test_junit_holds_whatever_a_trace_says() -> None:
    cases = [
        ci.Case("good", Exit.PASSED, seconds=1.25),
        ci.Case("<bad>", Exit.FOUND, 'a "quoted" \x00 text', "two\nlines & \ud800"),
        ci.Case("odd", Exit.UNJUDGED, "why"),
    ]
    (suite,) = ElementTree.fromstring(ci.format_junit("ttrace", cases))
    assert {key: suite.get(key) for key in ("tests", "failures", "errors")} == {
        "tests": "3",
        "failures": "1",
        "errors": "1",
    }
    good, bad, odd = suite
    assert (good.get("time"), len(good)) == ("1.250", 0)
    assert bad[0].tag == "failure"
    assert bad[0].get("message") == 'a "quoted" ? text'
    assert bad[0].text == "two\nlines & ?"
    assert odd[0].tag == "error"


def test_a_finding_as_text_fits_a_screen(judgement: Judgement) -> None:
    lines = render_text(judgement, "ttrace diff a b", height=24).splitlines()
    assert lines[0].startswith("✗ fc/output is the first wrong tensor")
    assert lines[-1] == "next: ttrace diff a b"
    assert len(lines) < 24
    assert "\x1b" not in "".join(lines)


@pytest.fixture
def table(judgement: Judgement) -> SweepTable:
    values = [{"tp": 1, "note": "<script>"}, {"tp": 2, "note": "<script>"}, {"tp": 4, "note": "<script>"}]
    known: list[dict[str, Any]] = [
        {"name": f"tp={v['tp']}", "values": v, "seconds": 1.0, "folder": f"out/cells/tp={v['tp']}"} for v in values
    ]
    clean = replace(judgement, findings=(), comparisons=judgement.comparisons[:1])
    rows = (
        SweepRow.of(clean, **known[0], exit=Exit.PASSED),
        SweepRow.of(judgement, **known[1], exit=Exit.FOUND),
        SweepRow.of(None, "torchrun ended\nbadly", **known[2], exit=Exit.UNJUDGED),
    )
    return SweepTable(rows, 1, "fails iff tp > 1", ("tp=2",))


def test_a_sweeps_json_says_when_it_fails(table: SweepTable) -> None:
    report = json.loads(json.dumps(sweep_report.as_json(table, Exit.FOUND)))
    assert (report["exit"], report["condition"], report["references"]) == (1, "fails iff tp > 1", 1)
    assert report["smallest"] == [{"tp": 2, "note": "<script>"}]
    assert [cell["exit"] for cell in report["cells"]] == [0, 1, 2]
    assert [cell["first"] for cell in report["cells"]] == ["", "fc/output", ""]
    assert report["cells"][2]["why"] == "torchrun ended\nbadly"


def test_a_sweeps_page_loads_nothing_and_escapes_texts(table: SweepTable) -> None:
    page = sweep_report.render_page(table)
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 3
    assert "<h1>fails iff tp &gt; 1</h1>" in page
    assert 'href="cells/tp=2/report.html"' in page
    assert "3 cells: 1 passed, 1 failed, 1 could not be judged; 1 reference<" in page


def test_a_sweeps_summary_has_the_condition(table: SweepTable) -> None:
    text = ci.format_sweep(table.condition, table.counts, Exit.FOUND)
    assert text.splitlines()[:3] == ["### ✗ TTrace sweep", "", "`fails iff tp > 1`"]
    assert "3 cells: 1 passed" in ci.format_sweep("", table.counts, Exit.PASSED)


def test_a_sweeps_cells_are_cases(table: SweepTable) -> None:
    (suite,) = ElementTree.fromstring(ci.format_junit("sweep", sweep_report.make_cases(table)))
    assert [[kind.tag for kind in case] for case in suite] == [[], ["failure"], ["error"]]
