"""Texts of others, in every place where they are shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.commands import ttrace
from tests.support.small_runs import RANK, change_document, write_run
from ttrace.layouts.ids import Kind, Site, encode_name
from ttrace.text import HIDDEN, clean_line, clean_text

EVIL = "note\n::error file=x::INJECTED\x1b[2J\x1b]52;c;cHduZWQ=\x07 \u202egnp.exe ##[error]INJECTED </script><script>"


@given(st.text())
def test_nothing_hidden_is_left(text: str) -> None:
    assert not HIDDEN.search(clean_text(text))
    line = clean_line(text)
    assert len(line.splitlines()) <= 1
    assert clean_line(line) == line
    assert Site(encode_name(text) or "x", Kind.OUTPUT)
    assert not re.search(r"(?m)^\s*::|##\[", clean_text(text))


def test_ordinary_text_stays_as_it_is() -> None:
    text = "größe.重み 5 · 10⁻³ „ja“\n\tb"
    assert clean_text(text) == text
    assert clean_line(text) == "größe.重み 5 · 10⁻³ „ja“ b"


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["for people", "for programs"])
def test_a_hostile_note_commands_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str]) -> None:
    run = write_run(tmp_path / "run", wrong=True)
    module = {"type": EVIL, "source": EVIL}
    for folder in (run.reference, run.candidate):
        for path in folder.glob("rank-*/manifest.json"):
            change_document(path, notes=[EVIL], modules={"fc1": module, "fc2": module}, versions={EVIL: EVIL})
    change_document(run.candidate / RANK / "end.json", notes=[EVIL])
    change_document(run.folder / "run.json", candidate=EVIL)
    summary, junit = tmp_path / "summary.md", tmp_path / "junit.xml"
    summary.touch()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    done = ttrace("check", str(run.folder), "--junit", str(junit), *flags)
    assert done.returncode == 1, done.stderr
    for line in done.stdout.splitlines():
        assert not re.match(r"\s*::|.*##\[", line), line
    for line in done.stderr.splitlines():
        assert not re.match(r"\s*::(?!error )|\s*::error file=x|.*##\[", line), line
    page = (run.folder / "report.html").read_text()
    for text in (done.stdout, done.stderr, summary.read_text(), junit.read_text(), page):
        assert not HIDDEN.search(text)
    for text in (done.stdout, page):
        assert not re.search(r"\\u(001b|202e|0007)", text)
    assert "</script><script>" not in page
    if flags:
        assert "INJECTED" in json.dumps(json.loads(done.stdout))
