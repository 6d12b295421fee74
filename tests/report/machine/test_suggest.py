"""Suggested rules state what was inferred, and never a pending sum without a warning."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.support.traces import Case, draw_tensor
from ttrace.layouts.ids import Kind, Site
from ttrace.layouts.rules import Rules
from ttrace.report.machine.suggest import find_unstated, suggest_rules


def unstated_site(case: Case, name: str, cut: bool) -> None:
    full = draw_tensor(4, 8, seed=len(name))
    case.add_trusted(name, full)
    for rank in range(2):
        case.candidate.record(rank, name, full.chunk(2, 1)[rank].contiguous() if cut else full)


def test_numbered_modules_share_a_rule_where_they_agree(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    for i in range(3):
        unstated_site(case, f"0/0/layers.{i}.fc1/output", cut=True)
        unstated_site(case, f"0/0/layers.{i}.mixed/output", cut=i == 1)
    table = tomllib.loads(suggest_rules(case.judge()))["layouts"]
    assert table == {
        "layers.*.fc1/output": "d0 d1/tp",
        "layers.0.mixed/output": "d0 d1",
        "layers.1.mixed/output": "d0 d1/tp",
        "layers.2.mixed/output": "d0 d1",
    }


def test_the_file_is_one_that_attach_reads(tmp_path: Path) -> None:
    case = Case(tmp_path / "traces", "tp=2")
    unstated_site(case, "0/0/layers.0.fc1/output", cut=True)
    (tmp_path / "rules.toml").write_text(suggest_rules(case.judge()))
    rule = Rules.of(tmp_path / "rules.toml").decide(Site("layers.7.fc1", Kind.OUTPUT))
    assert rule is not None
    assert str(rule.layout) == "d0 d1/tp"


def test_a_pending_sum_is_only_ever_a_comment_with_a_warning(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    full, part = draw_tensor(4, 8), draw_tensor(4, 8, seed=3)
    case.add_trusted("0/0/attn.proj/output", full)
    for rank, local in enumerate((part, full - part)):
        case.candidate.record(rank, "0/0/attn.proj/output", local)
    case.add("0/0/attn/output", draw_tensor(4, 8, seed=4))
    text = suggest_rules(case.judge())
    assert "proj" not in tomllib.loads(text)["layouts"]
    assert '# "attn.proj/output" = "... +tp"' in text
    assert "looks exactly like a pending sum" in text


def test_every_unstated_site_is_listed_once_with_what_is_known(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    for microbatch in (0, 1):
        unstated_site(case, f"0/{microbatch}/fc1/output", cut=True)
    full, part = draw_tensor(4, 8), draw_tensor(4, 8, seed=3)
    case.add_trusted("0/0/attn.proj/output", full)
    case.add_trusted("0/0/odd/output", full)
    for rank, local in enumerate((part, full - part)):
        case.candidate.record(rank, "0/0/attn.proj/output", local)
        case.candidate.record(rank, "0/0/odd/output", full[:, :3].contiguous())
    case.add("0/0/attn/output", draw_tensor(4, 8, seed=4))
    judgement = case.judge()
    assert find_unstated(judgement) == [
        {"site": "fc1/output", "how": "inferred", "layout": "d0 d1/tp"},
        {"site": "attn.proj/output", "how": "pending sum", "layout": "... +tp"},
        {"site": "odd/output", "how": "unknown", "layout": ""},
    ]
    text = suggest_rules(judgement)
    assert tomllib.loads(text)["layouts"] == {"fc1/output": "d0 d1/tp"}
    assert '# "odd/output" = "?"' in text


def test_a_parameter_needs_one_line_for_all_its_kinds(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    for kind in ("param", "param_grad", "param_after"):
        unstated_site(case, f"0/-/layers.0.fc1.weight/{kind}", cut=True)
    assert tomllib.loads(suggest_rules(case.judge()))["layouts"] == {"layers.*.fc1.weight": "d0 d1/tp"}


def contradicted_site(case: Case, name: str) -> None:
    """A site whose inferred layout does not give the reference's values."""
    case.add_trusted(name, draw_tensor(4, 8, seed=len(name)))
    for rank in range(2):
        case.candidate.record(rank, name, draw_tensor(4, 4, seed=40 + rank))


def test_no_rule_is_both_live_and_contradicted(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    unstated_site(case, "0/-/layers.0.fc1.weight/param", cut=True)
    contradicted_site(case, "0/-/layers.0.fc1.weight/param_grad")
    unstated_site(case, "0/0/layers.0.fc2/input", cut=True)
    contradicted_site(case, "0/0/layers.1.fc2/input")
    unstated_site(case, "0/0/head/output", cut=True)
    contradicted_site(case, "0/1/head/output")
    text = suggest_rules(case.judge())
    assert tomllib.loads(text)["layouts"] == {"layers.0.fc2/input": "d0 d1/tp"}
    comments = [line.removeprefix("# ") for line in text.splitlines() if line.startswith('# "')]
    assert comments == [
        '"layers.*.fc1.weight" = "d0 d1/tp"',
        '"layers.1.fc2/input" = "d0 d1/tp"',
        '"head/output" = "d0 d1/tp"',
    ]
