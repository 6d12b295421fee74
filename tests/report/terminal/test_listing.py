"""What a trace holds, and how one id differs, as a person sees it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.support.traces import Case, draw_tensor
from ttrace.errors import TTraceError
from ttrace.judge.tensors.difference import find_difference
from ttrace.layouts.ids import TensorId
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.report.facts import describe_provenance
from ttrace.report.terminal import difference as difference_report
from ttrace.report.terminal import listing
from ttrace.trace.reader import Trace

ID = "0/0/fc/output"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with both sides."""
    case = Case(tmp_path)
    case.add(ID, draw_tensor(4, 8), "a b/tp")
    case.add("0/0/head/output", draw_tensor(4, 8), "a b +tp")
    close(case)
    return tmp_path


def close(case: Case) -> None:
    case.reference.close()
    case.candidate.close()


def listed(folder: Path, pattern: str = "*", width: int = 120) -> str:
    file = io.StringIO()
    listing.show(Console(file=file, width=width), folder, listing.list_rows(folder, pattern))
    return file.getvalue()


def compared(case: Case, name: str, folder: str = "runs/a") -> str:
    file = io.StringIO()
    found = find_difference(case.reference.close(), case.candidate.close(), TensorId.parse(name))
    difference_report.show(Console(file=file, width=80), found, folder)
    return file.getvalue()


def test_a_summary_counts(run: Path) -> None:
    found = listing.summarize(run / "candidate")
    assert (found["role"], found["mesh"], found["ranks"], found["tensors"]) == ("candidate", "tp=2", 2, 2)
    assert found["problems"] == []


def test_every_id_of_both_sides_has_a_row(run: Path) -> None:
    rows = listing.list_rows(run, "*")
    assert [(row["id"], row["side"], row["shards"]) for row in rows] == [
        (ID, "reference", 1),
        ("0/0/head/output", "reference", 1),
        (ID, "candidate", 2),
        ("0/0/head/output", "candidate", 2),
    ]
    assert rows[2]["shape"] == (4, 8)
    assert (rows[2]["dtype"], rows[2]["layout"], rows[2]["by"]) == ("F32", "a b/tp", "test rule")


def test_one_id_shows_its_shards(run: Path) -> None:
    rows = listing.list_rows(run, ID)
    assert [(row["side"], row["where"], row["region"]) for row in rows] == [
        ("reference", "rank 0", "whole"),
        ("candidate", "rank 0 (tp0)", "[0:4, 0:4]"),
        ("candidate", "rank 1 (tp1)", "[0:4, 4:8]"),
    ]
    assert rows[0]["norm"] == pytest.approx(float(draw_tensor(4, 8).norm()))
    text = listed(run, ID)
    assert text.startswith(f"{ID}\n")
    assert "[0:4, 4:8]" in text
    assert text.splitlines()[-1] == f"next: ttrace diff {run} {ID}"


def test_pending_sums_are_shown(run: Path) -> None:
    assert [row["pending"] for row in listing.list_rows(run, "*head*")] == [[], ["tp"], ["tp"]]


def test_many_ids_end_with_how_to_see_one(run: Path) -> None:
    lines = listed(run).splitlines()
    assert lines[0].split() == ["id", "side", "shape", "dtype", "shards", "layout", "by"]
    assert lines[-1] == f"next: ttrace show {run} 0/0/fc/output"


def test_a_single_trace_is_not_sent_to_diff(run: Path) -> None:
    assert listed(run / "candidate", ID).splitlines()[-1] == f"next: ttrace show {run / 'candidate'}"


def test_nothing_found_says_how_to_list_all(run: Path) -> None:
    with pytest.raises(TTraceError, match=r"has no tensor 'nothing'\. `ttrace show .*` lists all"):
        listing.list_rows(run, "nothing")


def test_rows_are_valid_json_also_of_what_is_not_finite(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add(ID, torch.full((4, 8), torch.nan), "a b/tp")
    close(case)
    rows = json.loads(json.dumps(listing.list_rows(tmp_path, ID), allow_nan=False))
    assert {row["norm"] for row in rows} == {None}
    assert "not finite" in listed(tmp_path, ID)


def test_a_shard_without_a_layout_is_shown_as_such(tmp_path: Path) -> None:
    case = Case(tmp_path)
    for rank in range(2):
        case.candidate.record(rank, ID, draw_tensor(4, 4))
    case.candidate.close()
    rows = listing.list_rows(tmp_path / "candidate", ID)
    assert [(row["region"], row["by"]) for row in rows] == [("unknown", "nobody")] * 2


@pytest.mark.parametrize("name", ["[bold]", "a[0]", "x[red]y"])
@pytest.mark.parametrize("rule", ['rule "[/x]"', 'rule "[bold]*"'])
def test_markup_is_shown_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rule: str) -> None:
    monkeypatch.setattr("tests.support.traces.RULE", Provenance(LayoutSource.RULE, rule))
    case = Case(tmp_path)
    case.add_right(f"0/0/{name}/output", "0/0/other/output")
    close(case)
    everything, one = listed(tmp_path, width=200), listed(tmp_path, f"0/0/{name}/output", width=200)
    assert f"0/0/{name}/output" in everything
    assert one.startswith(f"0/0/{name}/output\n")
    assert rule in everything
    assert rule in one
    text = compared(case, f"0/0/{name}/output")
    assert text.startswith(f"0/0/{name}/output  shape [4, 8]\n")
    assert rule in text


def test_a_difference_shows_ranks_and_the_worst_elements(tmp_path: Path) -> None:
    case = Case(tmp_path)
    wrong = draw_tensor(4, 8)
    wrong[3, 7] += 5
    case.add(ID, draw_tensor(4, 8), "a/tp b", lambda _: wrong)
    lines = compared(case, ID).splitlines()
    assert lines[0] == f"{ID}  shape [4, 8]"
    assert lines[1] == 'layout "a/tp b", test rule'
    ranks = [line.split() for line in lines if line.startswith("rank ")]
    assert [words[:3] for words in ranks] == [["rank", "0", "(tp0)"], ["rank", "1", "(tp1)"]]
    assert ranks[0][-2] == "0.00e+00"
    assert float(ranks[1][-2]) > 1
    worst = next(line for line in lines if line.startswith("(3, 7)"))
    assert worst.rstrip().endswith("rank 1 (tp1)")
    assert lines[-1] == f"next: ttrace explain runs/a {ID}"


def test_a_difference_says_what_was_summed_and_which_factor_is_to_come(tmp_path: Path) -> None:
    case = Case(tmp_path, grad_factor=0.5)
    name = "0/0/fc/grad_output"
    case.add(name, draw_tensor(4, 8), "a b +tp", lambda x: 2 * x)
    line = compared(case, name).splitlines()[2]
    assert line.startswith("summed over tp, times the factor 0.5 of a later reduction, error ")


@pytest.mark.parametrize("factors", [(2, 4), (4, 2)], ids=str)
def test_a_difference_says_which_replica_it_is_of(tmp_path: Path, factors: tuple[int, int]) -> None:
    case, full = Case(tmp_path), draw_tensor(4, 8)
    case.add_trusted(ID, full)
    for rank, factor in enumerate(factors):
        case.candidate.record(rank, ID, factor * full, "a b")
    lines = compared(case, ID).splitlines()
    two, four = (
        "error 1.00e+00, best fit: candidate = 2 x reference",
        "error 3.00e+00, best fit: candidate = 4 x reference",
    )
    if factors == (2, 4):
        assert lines[2:4] == [f"{two} (rank 0 (tp0), the first of 2 replicas)", f"worst replica: {four} (rank 1 (tp1))"]
    else:
        assert lines[2:4] == [f"{four} (rank 0 (tp0), the worst of 2 replicas)", ""]
    found = difference_report.as_json(
        find_difference(Trace(tmp_path / "reference"), Trace(tmp_path / "candidate"), TensorId.parse(ID))
    )
    assert (found["where"], found["scale"]) == ("rank 0 (tp0)", pytest.approx(factors[0]))
    assert found["worst_replica"]["where"] == f"rank {factors.index(4)} (tp{factors.index(4)})"


def test_folders_with_spaces_are_quoted(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add(ID, draw_tensor(4, 8), "a/tp b")
    assert compared(case, ID, "my runs/a").splitlines()[-1] == f"next: ttrace explain 'my runs/a' {ID}"


def test_show_and_diff_agree_on_who_decided_a_layout(tmp_path: Path) -> None:
    case, full = Case(tmp_path), draw_tensor(4, 8)
    case.add_trusted(ID, full)
    for rank, local in enumerate(full.chunk(2, 1)):
        case.candidate.record(rank, ID, local.contiguous())
    found = find_difference(case.reference.close(), case.candidate.close(), TensorId.parse(ID))
    rows = [row for row in listing.list_rows(tmp_path, ID) if row["side"] == "candidate"]
    assert {(row["layout"], row["by"]) for row in rows} == {(found.layout, describe_provenance(found.by))}
    assert [row["region"] for row in rows] == [rank.region for rank in found.ranks] == ["[0:4, 0:4]", "[0:4, 4:8]"]


def test_a_part_of_a_name_is_enough(run: Path) -> None:
    assert {row["id"] for row in listing.list_rows(run, "fc")} == {ID}
    assert {row["id"] for row in listing.list_rows(run, "d/out*")} == {"0/0/head/output"}


def test_an_id_in_full_means_only_itself(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/output", "0/0/fc/output.1", "10/0/fc/output")
    close(case)
    assert {row["id"] for row in listing.list_rows(tmp_path, ID)} == {ID}
