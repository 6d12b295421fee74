"""Every cause is named by a detector or a finding, and is proven by an entry of the zoo or says why not."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from ttrace.judge import causes
from ttrace.judge.causes import DETECTORS
from ttrace.judge.causes.evidence import Detector, KnownCause
from ttrace.judge.causes.search import all_causes
from ttrace.judge.verdict import CauseName
from zoo.bug import entries
from zoo.mistakes import MISTAKES

ROOT = Path(__file__).parents[3]


def test_every_name_is_registered() -> None:
    assert {cause.name for cause in all_causes()} == set(CauseName)


def test_every_detector_is_asked_once() -> None:
    names = [path.stem for path in Path(causes.__file__).parent.glob("*.py") if path.stem != "__init__"]
    modules = [import_module(f"{causes.__name__}.{name}") for name in names]
    written = [each for module in modules for each in vars(module).values() if isinstance(each, Detector)]
    asked, defined = (
        {f"{each.find.__module__}.{each.find.__name__}" for each in some} for some in (DETECTORS, written)
    )
    assert asked == defined, f"DETECTORS of {causes.__file__} lacks {defined - asked}"
    assert len({id(detector) for detector in DETECTORS}) == len(DETECTORS)


@pytest.mark.parametrize("cause", all_causes(), ids=lambda cause: cause.name.value)
def test_every_cause_is_proven_or_says_why_not(cause: KnownCause) -> None:
    if cause.bug:
        assert cause.bug in entries(), f"the zoo has no entry {cause.bug}: add it to zoo/mistakes.py"
        assert entries()[cause.bug].expected.cause == cause.name.value
    else:
        why, _, test = cause.unproven.partition("; ")
        assert why
        assert (ROOT / test).is_file(), "a unit test shows it"


def test_every_typical_mistake_names_a_cause_that_is_registered() -> None:
    assert {bug.expected.cause for bug in MISTAKES.values()} <= {cause.name.value for cause in all_causes()}


def test_a_cause_needs_a_proof() -> None:
    with pytest.raises(AssertionError, match="state one proof"):
        KnownCause(CauseName.BIAS, "a row")


def test_the_docs_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
