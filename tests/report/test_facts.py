"""What is said of a finding is what was seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.traces import Case, draw_tensor
from ttrace.judge.verdict import Finding
from ttrace.report.facts import list_facts, make_headline


def finding_of(folder: Path, *, factor: float | None = None) -> Finding:
    case = Case(folder)
    case.add(
        "0/0/fc/output",
        draw_tensor(4, 8),
        "a b/tp",
        lambda x: x + draw_tensor(4, 8, seed=7) if factor is None else factor * x,
    )
    return case.judge().findings[0]


@pytest.mark.parametrize(("alone", "words"), [(True, "wrong by itself too"), (False, "wrong too"), (None, "wrong too")])
def test_only_what_isolation_showed_is_wrong_by_itself(tmp_path: Path, alone: bool | None, words: str) -> None:
    finding = replace(finding_of(tmp_path), alone=alone)
    assert make_headline(finding, first=False)[1] == f"is {words}  (step 0, microbatch 0)"


def test_without_isolation_nothing_is_said_of_it(tmp_path: Path) -> None:
    assert "isolated" not in dict(list_facts(finding_of(tmp_path), []))


def test_a_constant_factor_does_not_take_real_values(tmp_path: Path) -> None:
    factor = replace(finding_of(tmp_path / "a", factor=2.0), alone=False)
    words = "correct on generated inputs and gradients: the factor comes from outside this module"
    assert dict(list_facts(factor, []))["isolated"] == words
    other = replace(finding_of(tmp_path / "b"), alone=False)
    assert dict(list_facts(other, []))["isolated"].endswith("it is only wrong on the inputs of this run")


def test_a_file_below_the_working_folder_is_named_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long path would wrap, and say nothing that the reader does not know."""
    monkeypatch.chdir(tmp_path)
    finding = replace(finding_of(tmp_path), module="fc", source=f"{tmp_path}/model.py:7")
    assert dict(list_facts(finding, []))["module"] == "fc, model.py:7"
    elsewhere = replace(finding, source="/other/model.py:7")
    assert dict(list_facts(elsewhere, []))["module"] == "fc, /other/model.py:7"
