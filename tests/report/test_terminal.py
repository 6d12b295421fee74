"""What a person reads in a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.traces import Case, drawn
from ttrace.judge.check import check
from ttrace.judge.verdict import Judgement
from ttrace.report import terminal

NEXT = "ttrace diff runs/a 0/0/fc/output"


def shown(judgement: Judgement, *, width: int | None = None, is_terminal: bool = False) -> str:
    """What a pipe receives, or a terminal."""
    file = io.StringIO()
    terminal.show(Console(file=file, width=width, force_terminal=is_terminal), judgement, NEXT)
    return file.getvalue()


@pytest.fixture
def found(tmp_path: Path) -> Judgement:
    case = Case(tmp_path, notes=("dropout switched off",))
    case.right("0/0/a/output")
    case.both("0/0/fc/output", drawn(4, 8), "a b/tp", lambda x: 2 * x)
    case.wrong("0/0/head/input", "0/0/head/output")
    case.trusted("0/0/gone/output", drawn(4, 8))
    return case.judged()


def test_the_finding_comes_first_and_the_next_command_last(found: Judgement) -> None:
    lines = shown(found).splitlines()
    assert lines[0] == "✗ fc/output is the first wrong tensor  (step 0, microbatch 0)"
    assert lines[-1] == f"next: {NEXT}"


def test_a_finding_tells_cause_error_layout_and_source(found: Judgement) -> None:
    text = shown(found, width=200)
    assert "the candidate is 2 x the reference: scaled by tp (tp=2)" in text
    assert "x the tolerance" in text
    assert '"a b/tp", test rule' in text
    assert "fc, model.py:1" in text
    assert "2 tensors after it are wrong" in text


def test_what_could_not_be_judged_is_told_with_its_reason(found: Judgement) -> None:
    text = shown(found)
    assert "? 0/0/gone/output is MISSING: the candidate has no such tensor" in text
    assert "5 tensors: 1 PASS, 3 FAIL, 1 MISSING" in text
    assert "note: dropout switched off" in text
    assert "✓" not in text


def test_success_is_told(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.right("0/0/a/output")
    lines = shown(case.judged()).splitlines()
    assert lines[0] == "✓ every tensor agrees with the reference as far as rounding allows"
    assert lines[-1] == f"next: {NEXT}"


def test_an_empty_check_is_no_success(tmp_path: Path) -> None:
    text = shown(Case(tmp_path).judged())
    assert "✓" not in text
    assert "0 tensors: none" in text


def test_a_pipe_receives_no_escape_codes_and_a_terminal_does(found: Judgement) -> None:
    assert "\x1b" not in shown(found)
    assert "\x1b[" in shown(found, is_terminal=True)


@pytest.mark.parametrize("width", [40, 80])
def test_the_next_command_is_never_broken(found: Judgement, width: int) -> None:
    assert shown(found, width=width).splitlines()[-1] == f"next: {NEXT}"


def test_details_fit_eighty_columns_but_for_words_that_must_stay_whole(tmp_path: Path) -> None:
    case = Case(tmp_path)
    name = ".".join(["encoder"] * 12)
    case.both(f"0/0/{name}/output", drawn(4, 8), "a b/tp", lambda x: 2 * x)
    lines = shown(case.judged(), width=80).splitlines()
    details = [line for line in lines[1:] if line.startswith("  ")]
    assert details
    # A path that is cut in two cannot be copied.
    assert all(len(line) <= 80 or len(line[12:].split()) == 1 for line in details)


@pytest.mark.parametrize("name", ["[bold]", "[red]x", "x[link=y]", "a[0]", "\\[bold]", "a\\", ":smile:"])
def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path, name: str) -> None:
    case = Case(tmp_path)
    case.wrong(f"0/0/{name}/output")
    case.trusted(f"0/0/{name}2/output", drawn(4, 8))
    text = shown(case.judged(), width=200)
    assert text.startswith(f"✗ {name}/output is the first wrong tensor")
    assert f"{name}, model.py:1" in text
    assert f"? 0/0/{name}2/output is MISSING" in text


def test_markup_in_notes_problems_and_rules_is_shown_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.traces.RULE", 'rule "[/x] [bold]"')
    case = Case(tmp_path, notes=("note [/x] [bold]",))
    case.wrong("0/0/fc/output")
    judgement = check(case.reference.close(), [], case.candidate.close(problems=["problem [/x] [bold]"]))
    text = shown(judgement, width=200)
    for word in ("rule", "note", "problem"):
        assert f"{word} " in text
    assert text.count("[/x] [bold]") == 4  # the problem once for each rank


def test_many_findings_are_cut_short_and_counted(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.wrong(*(f"0/0/m{i}/output" for i in range(8)))
    for i in range(7):
        case.trusted(f"0/{i}/m0/grad_input", drawn(4, 8))
    text = shown(case.judged())
    assert text.count("wrong by itself too") == 4
    assert "... and 3 further findings" in text
    assert "... and 2 more that could not be judged" in text


def test_a_missing_layer_is_one_line(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.right("0/0/a/output")
    for kind in ("input", "output", "grad_output", "grad_input"):
        case.trusted(f"0/0/layers.3/{kind}", drawn(4, 8))
    text = shown(case.judged())
    assert "? the candidate has no layers.3: 4 tensors missing" in text
    assert "is MISSING" not in text
