"""What stands on the HTML report, before any browser sees it."""

from __future__ import annotations

import base64
import json
import math
import os
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.judgements import large
from tests.support.traces import Case, draw_tensor
from ttrace.judge.verdict import Judgement
from ttrace.report.page import document
from ttrace.report.page.contents import About, Side, build_page, measure_stages, read_sides
from ttrace.report.page.document import render_document
from ttrace.report.terminal.depth import Depth
from ttrace.trace.seal import seal_document


def unpacked(packed: dict[str, str]) -> list[Any]:
    values = array(packed["as"], base64.b64decode(packed["data"]))
    return list(values)


@pytest.mark.parametrize(
    ("values", "kind"), [([0, -128, 127], "b"), ([128], "h"), ([-(1 << 15) - 1], "i"), ([1 << 40], "d"), ([], "b")]
)
def test_whole_numbers_take_as_few_bytes_as_they_need(values: list[int], kind: str) -> None:
    packed = document.pack_integers(values)
    assert (packed["as"], unpacked(packed)) == (kind, values)


def test_numbers_that_do_not_fit_are_infinite_and_others_stay() -> None:
    *numbers, none = unpacked(document.pack_floats([0.5, 1e300, -math.inf, math.nan]))
    assert numbers == [0.5, math.inf, -math.inf]
    assert math.isnan(none)


def test_texts_are_kept_once() -> None:
    packed = document.pack_words(["a", "b", "a"])
    assert packed["words"] == ["a", "b"]
    assert unpacked(packed) == [0, 1, 0]


@pytest.fixture
def found(tmp_path: Path) -> Judgement:
    case = Case(tmp_path, parameters={"fc.weight": True})
    case.add_right("0/0/a/input", "0/0/a/output")
    case.add("0/0/fc/output", draw_tensor(4, 8), "a b/tp", lambda x: 2 * x)
    case.add("0/0/fc/grad_output", draw_tensor(4, 8), "a b/tp")
    case.add("0/0/a/grad_input", draw_tensor(4, 8), "a b/tp")
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 8), "a b/tp")
    case.add_trusted("0/0/gone/output", draw_tensor(4, 8))
    return case.judge()


def test_forward_backward_and_parameters_share_one_depth(found: Judgement) -> None:
    depth = Depth.of(found.comparisons)
    at = {str(c.id): depth.names[place] for c, place in zip(found.comparisons, depth.places, strict=True)}
    assert depth.names == ("a", "a", "fc", "gone")
    assert at["0/0/fc/grad_output"] == at["0/-/fc.weight/param_grad"] == "fc"
    places = dict(zip(at, depth.places, strict=True))
    assert places["0/0/a/grad_input"] == places["0/0/a/input"] < places["0/0/a/output"]


def test_the_page_says_what_the_judgement_says(found: Judgement, tmp_path: Path) -> None:
    made = build_page(found, About.of(tmp_path, "ttrace diff x"))
    assert made["head"] | {"rest": ""} == {
        "exit": 1, "symbol": "✗", "mesh": "tp=2", "ranks": 2, "what": "fc/output", "rest": "",
    }  # fmt: skip
    assert made["counts"]["FAIL"] == 1
    assert made["precision"] == {"epsilon": 2.0**-23, "name": "float32"}
    assert dict(made["findings"][0]["facts"])["cause"].startswith("the candidate is 2 x the reference")
    assert made["maps"][0]["id"] == "0/0/fc/output"
    assert made["coverage"]["reasons"][0]["reason"] == "the candidate has no such tensor"
    assert made["power"]["blind"][0][0] == "fc.weight"
    assert len(unpacked(made["tensors"]["error"])) == made["count"] == len(found.comparisons)
    json.dumps(made, allow_nan=False)


def test_replicas_that_differ_are_told_by_axis(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2 tp=2")
    full = draw_tensor(4, 8)
    case.add_trusted("0/0/fc/output", full)
    for rank in range(4):
        case.candidate.record(rank, "0/0/fc/output", full * (1 + rank % 2), "...")
    (conflict,) = build_page(case.judge(), About.of(tmp_path, ""))["conflicts"]
    assert (conflict["axis"], conflict["count"], conflict["first"]) == ("tp", 1, "0/0/fc/output")


def test_sketches_have_no_maps_but_show_along_which_axis_replicas_differ(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2", num_buckets=64)
    full = draw_tensor(16, 8)
    case.add_trusted("0/0/fc/output", full)
    for rank in range(2):
        case.candidate.record(rank, "0/0/fc/output", full * (1 + rank), "...")
    made = build_page(case.judge(), About.of(tmp_path, ""))
    assert made["maps"] == []
    assert made["conflicts"][0]["axis"] == "tp"


def test_an_empty_judgement_has_a_page_too(tmp_path: Path) -> None:
    made = build_page(Case(tmp_path).judge(), About("runs/a", "ttrace show runs/a"))
    assert made["head"]["symbol"] == "?"
    assert "<script" in render_document(made)


def test_a_run_in_which_only_problems_are_left_says_so(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    judgement = replace(case.judge(), problems=("a rule does not fit",))
    head = build_page(judgement, About("runs/a", ""))["head"]
    assert head["rest"] == "every tensor agrees with the reference within rounding error, but the run has problems"


def test_no_tag_begins_inside_the_data(tmp_path: Path) -> None:
    case = Case(tmp_path, notes=("</script><!--",))
    case.add_wrong("0/0/<script>{{REST}}/output")
    text = render_document(build_page(case.judge(), About.of(tmp_path, "")))
    assert text.count("<!--") == 0
    assert text.count("</script>") == text.count("<script") == 5
    assert "{{REST}}" in text  # what is filled in is not filled in again


def test_a_large_model_is_a_small_file() -> None:
    assert len(render_document(build_page(large(10, 20), About("runs/a", "")))) < 600_000


def test_each_trace_says_when_and_from_which_commit_it_was_made(tmp_path: Path) -> None:
    mark = {"command": ["python", "a b.py"], "time": "2026-11-16T07:53:15+02:00", "git": f"{'ab' * 20}+"}
    (tmp_path / "reference.done.json").write_text(seal_document(json.dumps(mark)))
    (tmp_path / "candidate.done.json").write_text("damaged")
    (tmp_path / "run.json").write_text(seal_document('{"reference": "x", "candidate": "y", "git": "cdef"}'))
    reference = Side("python 'a b.py'", "2026-11-16 05:53 UTC", "abababababab, with uncommitted changes")
    assert read_sides(tmp_path) == {"reference": reference, "candidate": Side("y", "", "cdef")}


def test_a_reference_that_cells_share_has_its_own_mark(tmp_path: Path) -> None:
    shared = tmp_path / "references" / "a"
    shared.mkdir(parents=True)
    (shared.parent / "a.done.json").write_text(seal_document('{"git": "abc"}'))
    (tmp_path / "cell").mkdir()
    (tmp_path / "cell" / "reference").symlink_to(shared)
    assert read_sides(tmp_path / "cell")["reference"].commit == "abc"


def test_the_root_is_named_by_its_class(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/./output")
    judgement = case.judge()
    assert build_page(judgement, About.of(tmp_path, ""))["root"] == "Module"
    assert build_page(judgement, About("runs/a", ""))["root"] == "model"


def test_a_stage_lasts_from_its_plan_to_the_end_of_its_last_rank(tmp_path: Path) -> None:
    for name, start, ends in (("candidate", 20, (25, 30)), ("reference", 10, (12,)), ("twin-1", 15, ())):
        (tmp_path / f"{name}.plan.json").touch()
        os.utime(tmp_path / f"{name}.plan.json", (start, start))
        for rank, end in enumerate(ends):
            folder = tmp_path / name / f"rank-{rank}"
            folder.mkdir(parents=True)
            (folder / "end.json").touch()
            os.utime(folder / "end.json", (end, end))
    assert list(measure_stages(tmp_path).items()) == [("reference", 2.0), ("candidate", 10.0)]
