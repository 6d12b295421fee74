"""Reasons are data: each has a sentence, and nothing in the package branches on one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ttrace.judge.reason import Reason, Why, describe

SOURCE = Path(__file__).parents[2] / "src" / "ttrace"
WORDED = {"sentence", "evidence", "problems", "notes", "suggestion"}
"""Attributes that hold text for people."""


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_every_reason_has_a_sentence(reason: Reason) -> None:
    facts = Why(reason, "candidate", ("tp", "dp"), ((2, 3), (4,)), (1, 0), 5, 7, 0.5, 0.25, "2027-01-31: ties")
    sentence = describe(facts)
    assert sentence
    assert "{" not in sentence
    assert not sentence.endswith(".")


def test_names_of_reasons_are_different() -> None:
    assert len({reason.value for reason in Reason}) == len(Reason)
    sentences = [describe(Why(reason)) for reason in Reason]
    assert len(set(sentences)) == len(sentences)


def test_a_long_list_of_modules_is_cut_short() -> None:
    names = tuple(f"layers.{i}" for i in range(6))
    words = "the candidate has no layers.0, layers.1, layers.2, layers.3 and 2 more"
    assert describe(Why(Reason.NO_MODULE, "candidate", names)) == words


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_branches_on_a_sentence(path: Path) -> None:
    """mypy refuses to compare a Reason or a CauseName with text; this finds comparisons of the sentences themselves."""
    found = [f"{path}:{node.lineno}" for node in branches_on_text(ast.parse(path.read_text()))]
    assert found == []


def test_such_a_branch_would_be_found() -> None:
    for code in (
        "describe(c.why) == 'no layout'",
        "'no layout' in describe(c.why)",
        "describe(c.why).startswith('no')",
        "cause.sentence.endswith('twice')",
        "finding.cause.sentence in known",
        "judgement.problems[0].startswith('axis')",
    ):
        assert list(branches_on_text(ast.parse(code))), code
    assert not list(branches_on_text(ast.parse("c.reason is Reason.ZERO and bool(judgement.problems)")))


def branches_on_text(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            operands = [node.func.value] if node.func.attr in ("startswith", "endswith") else []
        else:
            continue
        if any(map(is_text, operands)):
            yield node


def is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):
        return is_text(node.value)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "describe"
    return isinstance(node, ast.Attribute) and node.attr in WORDED
