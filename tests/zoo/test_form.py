"""What an entry of the zoo must be, and how it is counted."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest

import zoo.bugs
from ttrace.compat.torch import RELEASE, parse_release
from ttrace.judge.verdict import Exit
from zoo import watched
from zoo.bug import Bug, Expected, Run, Tier, Topic, bugs, entries, story, title
from zoo.controls import Clean, Control, controls, every, few
from zoo.evaluation import PAGE, Evaluation
from zoo.fixed import FIXED
from zoo.harness.torches.environment import OWN
from zoo.lines import ENTRIES, format_section, measure, read_rows, replace_section
from zoo.naive import Cost, parted
from zoo.score import Line, Score
from zoo.seen import Seen

FOLDER = Path(zoo.bugs.__path__[0])
PAPER = set(range(1, 15))
EVALUATED = bugs(parse_release(OWN))
"""The entries of the torch with which the zoo is evaluated, whatever torch runs this."""


@pytest.mark.parametrize("name", bugs())
def test_an_entry_tells_its_story_and_cites_it(name: str) -> None:
    bug = bugs()[name]
    assert title(name).endswith(".")
    assert len(story(name).splitlines()) >= 3
    assert bug.sources
    assert all(source.startswith("https://github.com/") for source in bug.sources)
    assert 25 <= len((FOLDER / f"{name.replace('-', '_')}.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", entries())
def test_the_two_sides_of_an_entry_differ(name: str) -> None:
    broken, clean = Run(name, is_clean=False), Run(name, is_clean=True)
    assert broken.case != clean.case or broken.patch is not clean.patch


def test_the_zoo_has_every_tier_topic_and_bug_of_the_paper() -> None:
    every_bug = EVALUATED.values()
    assert {bug.tier for bug in every_bug} == set(Tier) - {Tier.T4}
    assert {bug.topic for bug in every_bug} | {Topic.HIDDEN} == set(Topic)
    assert {bug.paper for bug in every_bug} - {0} == PAPER
    assert len(every_bug) >= 80
    assert sum(bug.tier is Tier.T1 for bug in every_bug) >= 30


def test_there_are_more_than_200_controls_in_three_precisions() -> None:
    assert len(every()) >= 200
    for word in ("float32", "bfloat16", "fp8"):
        assert sum(word in name for name in controls()) >= 20
    assert set(few()) < set(every())


def test_a_side_that_draws_random_numbers_must_be_recognised_not_judged() -> None:
    random = Control("functional-dropout-float32")
    assert not random.is_accused(Seen(Exit.UNJUDGED))
    assert random.is_accused(Seen(Exit.FOUND))
    assert random.is_accused(Seen(Exit.PASSED))
    assert Control("dropout-float32").is_accused(Seen(Exit.UNJUDGED))


def line(bug: Bug, broken: Seen, clean: Seen = Seen(Exit.PASSED)) -> Line:  # noqa: B008  # it is immutable
    return Line("one", bug, broken, clean)


def right(bug: Bug) -> Seen:
    said = bug.expected
    return Seen(Exit.FOUND, said.module, said.kind, said.cause, said.axis)


def test_a_score_counts_what_was_found_where_and_why() -> None:
    bug = bugs()["sp-norm-not-summed"]
    found = right(bug)
    lines = [
        line(bug, found),
        line(bug, replace(found, cause="constant factor")),
        line(bug, replace(found, module="other")),
        line(bug, Seen(Exit.UNJUDGED)),
        line(bug, found, Seen(Exit.UNJUDGED)),
    ]
    facts = Score(lines, 1.0).as_json()
    assert (facts["detected"], facts["localised"], facts["cause"]) == (0.8, 0.6, 0.4)
    assert [len(facts[key]) for key in ("missed", "elsewhere", "other_cause", "false_alarms")] == [1, 1, 1, 1]


def test_one_miss_or_one_false_alarm_fails_the_score() -> None:
    bug = bugs()["sp-norm-not-summed"]
    lines = [line(bug, right(bug))] * 30
    assert Score(lines, 1.0).passes
    assert not Score([*lines, line(bug, Seen(Exit.UNJUDGED))], 1.0).passes
    assert not Score([*lines, line(bug, right(bug), Seen(Exit.FOUND))], 1.0).passes
    assert not Score([*lines, line(bug, right(bug), Seen(Exit.UNJUDGED))], 1.0).passes


def test_a_cause_that_is_not_known_never_counts() -> None:
    bug = bugs()["cp-keys-gathered-along-heads"]
    assert bug.expected.cause == "unexplained"
    assert not line(bug, right(bug)).is_explained


def test_the_zoo_imports_nothing_from_tests() -> None:
    root = Path(inspect.getfile(zoo)).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "tests"], path


def test_the_evaluation_knows_every_entry_control_and_rule() -> None:
    """It is written by `python -m zoo evaluate`."""
    page = PAGE.read_text()
    pages = page + watched.PAGE.read_text()
    assert [name for name, bug in EVALUATED.items() if f"| `{name}` | {bug.tier} |" not in pages] == []
    if RELEASE >= (2, 9):  # before, torch has fewer schedules
        assert f"{len(every())} clean controls" in page
    assert [name for name in FIXED if f"| {name} |" not in page] == []


def test_the_evaluation_counts_what_was_missed_and_accused() -> None:
    name, control = "sp-norm-not-summed", every()[0]
    bug = bugs()[name]
    accused = Seen(Exit.FOUND, accusers=frozenset(FIXED))
    lines = [Line(name, bug, right(bug), Seen(Exit.PASSED)), Line(name, bug, Seen(Exit.UNJUDGED), accused)]
    clean = Clean({control: Seen(Exit.FOUND, sentence="one is wrong")}, 1.0)
    page = Evaluation(Score(lines, 1.0), clean, Cost(31, 10.0, 20.0, "fc1 is wrong")).page()
    assert "| detected | 50.0% | 100% |" in page
    assert "| clean controls accused | 1 of 1 |" in page
    assert f"| {next(iter(FIXED))} | 1 | 2 | 2 |" in page
    assert "| **TTrace** | 2 | 1 | 1 |" in page
    assert "| loss curves | 31 | 10 |" in page


def test_curves_part_where_their_means_do() -> None:
    falling = [5.0 - 0.1 * step for step in range(40)]
    assert parted(falling, falling) is None
    assert parted(falling, [loss * (1.1 if step >= 20 else 1.0) for step, loss in enumerate(falling)]) == 24


def test_every_stated_line_is_a_line_of_the_zoo() -> None:
    text = "\n".join(
        path.read_text() for path in Path(inspect.getfile(zoo)).parent.rglob("*.py") if path.parent != FOLDER
    )
    stated = {name: bug.expected for name, bug in EVALUATED.items() if bug.expected.line}
    for name, expected in stated.items():
        lines = (FOLDER / f"{name.replace('-', '_')}.py").read_text().splitlines()
        own = [line for line in lines if expected.line in line and "line=" not in line]
        assert own or expected.line in text, name
        assert expected.operation, name
    assert len(stated) >= ENTRIES


def test_the_evaluation_has_the_lines_that_were_measured() -> None:
    """They are written by `python -m zoo score --by-line`."""
    rows = read_rows()
    assert format_section(rows) in PAGE.read_text()
    assert {name for name, bug in EVALUATED.items() if bug.expected.line} == set(rows)
    page = PAGE.read_text()
    assert replace_section(page, rows) == page


def test_a_line_counts_where_it_is_the_stated_one_or_its_call() -> None:
    here = inspect.getsourcelines(test_a_line_counts_where_it_is_the_stated_one_or_its_call)[1]
    expected = Expected("a", "output", "zeros", line="def test_a_line_counts", operation="mul")
    named = Seen(Exit.FOUND, operation="mul", line=f"{__file__}:{here}")
    assert measure(expected, named)["line"]
    assert measure(expected, replace(named, line=f"{__file__}:1", called_at=named.line))["line"]
    other = measure(expected, replace(named, line=f"{__file__}:1"))
    assert (other["line"], other["operation"], bool(other["reason"])) == (False, True, True)
