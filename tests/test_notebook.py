"""What a notebook shows of an object: the verdict, and names as text, whatever is in them."""

from __future__ import annotations

from html.parser import HTMLParser

import torch
from torch import nn

import ttrace
from ttrace.judge.verdict import Cause, CauseName, Comparison, Finding, Judgement, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.monitor.disagreement import Disagreement, Trouble
from ttrace.notebook import make_table

HOSTILE = "<script>alert('1')</script>&\"</td>"


class Text(HTMLParser):
    """Reader of HTML: the tags, and the text between them as a browser shows it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def judge(*comparisons: Comparison, findings: tuple[Finding, ...] = (), problems: tuple[str, ...] = ()) -> Judgement:
    return Judgement(comparisons, findings, problems)


def test_a_judgement_shows_its_verdict_and_its_findings() -> None:
    wrong = Comparison(TensorId.parse("0/0/fc1/output"), Verdict.FAIL)
    right = Comparison(TensorId.parse("0/0/fc2/output"), Verdict.PASS)
    assert Text(judge(right)._repr_html_()).texts == ["✓ every tensor agrees (1 PASS)"]
    assert Text(judge()._repr_html_()).texts == ["? no verdict (nothing compared)"]
    cause = Cause(CauseName.UNEXPLAINED, HOSTILE)
    finding = Finding(wrong, HOSTILE, f"{HOSTILE}.py:3", cause, 0)
    shown = Text(judge(right, wrong, findings=(finding,), problems=(HOSTILE,))._repr_html_())
    assert shown.tags == {"p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert shown.texts[0] == "✗ something is wrong (1 PASS, 1 FAIL)"
    assert shown.texts.count(HOSTILE) == 2
    assert {"0/0/fc1/output", f"{HOSTILE}.py:3"} <= set(shown.texts)


def test_a_monitor_shows_what_it_found() -> None:
    model = nn.Linear(2, 2, device="cpu")
    monitor = ttrace.watch(model, torch.optim.SGD(model.parameters()), mesh={"dp": 1})
    try:
        assert Text(monitor._repr_html_()).texts == ["✓ step 0: 0 disagreements in 0 checks"]
        monitor.disagreements.append(Disagreement(Trouble.REPLICAS_DIFFER, 3, HOSTILE, (0, 1), axis="dp"))
        shown = Text(monitor._repr_html_())
    finally:
        monitor.close()
    assert shown.texts[0].startswith("✗ step 0: 1 disagreements")
    assert {"replicas differ", HOSTILE, "0 1", "dp"} <= set(shown.texts)
    assert "script" not in shown.tags


def test_a_long_table_is_cut() -> None:
    shown = Text(make_table("many", ("number",), [(number,) for number in range(12)]))
    assert shown.texts[-2:] == ["9", "... and 2 more"]
