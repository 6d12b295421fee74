"""What a person reads in a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.judgements import large
from tests.support.traces import Case, draw_tensor
from ttrace.judge.check import check
from ttrace.judge.verdict import Judgement
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.report.terminal import summary

NEXT = "ttrace diff runs/a 0/0/fc/output"


def shown(
    judgement: Judgement,
    *,
    width: int | None = None,
    is_terminal: bool = False,
    environment: dict[str, str] | None = None,
) -> str:
    """What a pipe receives, or a terminal of 24 lines."""
    file = io.StringIO()
    height = 24 if is_terminal else None
    # Rich's own door for a test's environment.
    console = Console(file=file, width=width, height=height, force_terminal=is_terminal, _environ=environment)
    summary.show(console, judgement, NEXT, Path("runs/a/report.html"))
    return file.getvalue()


@pytest.fixture
def found(tmp_path: Path) -> Judgement:
    case = Case(tmp_path, notes=("dropout switched off",))
    case.add_right("0/0/a/output")
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b/tp", lambda x: 2 * x)
    case.add_wrong("0/0/head/input", "0/0/head/output")
    case.add_trusted("0/0/gone/output", draw_tensor(4, 8))
    return case.judge()


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


def test_verdicts_are_explained_where_they_occur(tmp_path: Path) -> None:
    case, full = Case(tmp_path), draw_tensor(4, 8)
    case.add_right("0/0/a/output")
    case.add_trusted("0/0/fc/output", full)
    case.add_trusted("0/0/head/output", full)
    for rank in range(2):
        case.candidate.record(rank, "0/0/fc/output", (rank + 1) * full, "a b")
    case.candidate.record(0, "0/0/head/output", full[:2], "a/tp b", shape=(4, 8))
    lines = shown(case.judge(), width=200).splitlines()
    assert "3 tensors: 1 PASS, 1 CONFLICT (replicas differ), 1 GAP (no rank holds some part)" in lines


def test_success_is_told(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    lines = shown(case.judge()).splitlines()
    assert lines[0] == "✓ every tensor agrees with the reference within rounding error"
    assert lines[-1] == f"next: {NEXT}"


def test_a_success_says_what_it_is_worth() -> None:
    lines = shown(large(4, 2), width=100, is_terminal=True, environment={"TERM": "dumb"}).splitlines()
    assert [line.rstrip() for line in lines[1:6]] == [
        "  power     an error of 0.0003% of any gradient's norm would have been found, except in",
        "            layers.3.attn.key.bias (its gradient is zero but for rounding, or not judged)",
        "  untested  later steps (one step was traced), clipping (none was seen), ignored labels (the batch",
        "            has no -100), the script's own data (replaced by generated values)",
        "  depth       layers.0 to 3: ▁ to ▇ error within the tolerance",
    ]


def test_an_empty_check_is_no_success(tmp_path: Path) -> None:
    text = shown(Case(tmp_path).judge())
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
    case.add(f"0/0/{name}/output", draw_tensor(4, 8), "a b/tp", lambda x: 2 * x)
    lines = shown(case.judge(), width=80).splitlines()
    details = [line for line in lines[1:] if line.startswith("  ")]
    assert details
    # A path that is cut in two cannot be copied.
    assert all(len(line) <= 80 or len(line[12:].split()) == 1 for line in details)


@pytest.mark.parametrize("name", ["[bold]", "[red]x", "x[link=y]", "a[0]", "\\[bold]", "a\\", ":smile:"])
def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path, name: str) -> None:
    case = Case(tmp_path)
    case.add_wrong(f"0/0/{name}/output")
    case.add_trusted(f"0/0/{name}2/output", draw_tensor(4, 8))
    text = shown(case.judge(), width=200)
    assert text.startswith(f"✗ {name}/output is the first wrong tensor")
    assert f"{name}, model.py:1" in text
    assert f"? 0/0/{name}2/output is MISSING" in text


def test_markup_in_notes_problems_and_rules_is_shown_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.traces.RULE", Provenance(LayoutSource.RULE, 'rule "[/x] [bold]"'))
    case = Case(tmp_path, notes=("note [/x] [bold]",))
    case.add_wrong("0/0/fc/output")
    judgement = check(case.reference.close(), [], case.candidate.close(problems=["problem [/x] [bold]"]))
    text = shown(judgement, width=200)
    for word in ("rule", "note", "problem"):
        assert f"{word} " in text
    assert text.count("[/x] [bold]") == 3  # the problem once, though both ranks tell it


def test_many_findings_are_cut_short_and_counted(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_wrong(*(f"0/0/m{i}/output" for i in range(8)))
    for i in range(7):
        case.add_trusted(f"0/{i}/m0/grad_input", draw_tensor(4, 8))
    text = shown(case.judge())
    assert text.count("is wrong too") == 4
    assert "by itself" not in text  # nothing ran in isolation
    assert "... and 3 further findings" in text
    assert "... and 2 more tensors could not be judged" in text


def test_a_missing_layer_is_one_line(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    for kind in ("input", "output", "grad_output", "grad_input"):
        case.add_trusted(f"0/0/layers.3/{kind}", draw_tensor(4, 8))
    text = shown(case.judge())
    assert "? the candidate has no layers.3: 4 tensors missing" in text
    assert "is MISSING" not in text


def many_layers(case: Case, num_layers: int) -> Judgement:
    """Layers of which the fourth and all after it are wrong, for want of a reduction, and lots of notes."""
    for i in range(num_layers):
        case.add(
            f"0/0/model.layers.{i}.mlp.fc1/output",
            draw_tensor(4, 8, seed=i),
            "a b/tp",
            (lambda x: 2 * x) if i > 2 else None,
        )
        case.add(
            f"0/0/model.layers.{i}.mlp/output",
            draw_tensor(4, 8, seed=i),
            "a b/tp",
            (lambda x: 3 * x) if i > 2 else None,
        )
        case.add(f"0/-/model.layers.{i}.mlp.fc1.weight/param_grad", draw_tensor(4, 8, seed=i), "a b/tp")
    return case.judge()


@pytest.mark.parametrize("num_layers", [4, 12, 60])
def test_a_finding_fits_a_screen(tmp_path: Path, num_layers: int) -> None:
    notes = tuple(f"note number {i}, which is of a length that some notes have, and some are longer" for i in range(30))
    judgement = many_layers(Case(tmp_path, notes=notes), num_layers)
    rows = [
        line[i : i + 80]
        for line in plain(shown(judgement, width=80, is_terminal=True))
        for i in range(0, len(line) or 1, 80)
    ]
    assert len(rows) < 24
    assert rows[0].startswith("✗ model.layers.3.mlp.fc1/output is the first wrong tensor")
    assert rows[-1] == f"next: {NEXT}"
    assert any(row.startswith("  depth") for row in rows)
    assert any(re.fullmatch(r"\.\.\. and \d+ more notes in the report", row) for row in rows)
    assert len([line for line in shown(judgement).splitlines() if line.startswith("note:")]) == 30


def plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


def test_the_strip_has_a_mark_for_each_layer(tmp_path: Path) -> None:
    lines = shown(many_layers(Case(tmp_path), 6), width=100).splitlines()
    assert "  forward     ▁▁▁✗✗✗" in lines
    assert "  param_grad  ▁▁▁▁▁▁" in lines
    assert not [line for line in lines if line.startswith("  backward")]


def test_many_layers_share_marks(tmp_path: Path) -> None:
    lines = shown(many_layers(Case(tmp_path), 60), width=44).splitlines()
    (forward,) = [line.split()[1] for line in lines if line.startswith("  forward")]
    assert forward == "▁" + "✗" * 29
    assert any("model.layers.0 to 59, 2 layers per mark" in line for line in lines)


def test_the_tree_leads_to_the_first_wrong_tensor(tmp_path: Path) -> None:
    lines = shown(many_layers(Case(tmp_path), 12), width=100).splitlines()
    at = lines.index("  wrong: 18 tensors")
    assert lines[at + 1 : at + 8] == [
        "  └── model.layers  18",
        "      ├── 3.mlp  2",
        "      │   └── fc1  1: output",
        "      ├── 4  2",
        "      ├── 5  2",
        "      ├── 6  2",
        "      └── ... 5 more: 10",
    ]


def test_one_wrong_module_needs_no_tree_and_a_model_without_layers_no_strip(found: Judgement, tmp_path: Path) -> None:
    assert "depth" not in shown(found)
    case = Case(tmp_path / "one")
    case.add_wrong("0/0/fc/output")
    assert "wrong:" not in shown(case.judge())


def test_no_colour_where_nobody_wants_it(found: Judgement) -> None:
    assert "\x1b[1;31m" in shown(found, is_terminal=True, environment={"TERM": "xterm-256color"})
    assert "31m" not in shown(found, is_terminal=True, environment={"TERM": "xterm-256color", "NO_COLOR": "1"})


def test_a_problem_of_a_run_in_which_every_tensor_agrees_is_the_headline(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    problems = ['a/output: rule "a" does not fit', 'b/output: rule "b" does not fit']
    judgement = check(case.reference.close(), [case.twin.close()], case.candidate.close(problems=problems))
    lines = shown(judgement, width=200).splitlines()
    agrees = "every tensor agrees with the reference within rounding error"
    assert lines[:3] == [f"? {agrees}, but the run has problems:", *(f"? {problem}" for problem in problems)]
    assert not any("does not fit" in line for line in lines[3:])
