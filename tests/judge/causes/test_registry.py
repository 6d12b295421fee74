"""Every cause is registered, has its place in the order, and is proven by a fault or says why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.catalogue import CATALOGUE
from ttrace.judge.causes import registry
from ttrace.judge.causes.registry import FIRST, RegisteredCause, all_causes, detectors
from ttrace.judge.verdict import CauseName
from zoo.bug import bugs

ROOT = Path(__file__).parents[3]
ORDER = [
    "find_not_finite",
    "find_not_updated",
    "find_other_settings",
    "find_updated_twice",
    "find_zeros",
    "find_offset",
    "find_missing_all_reduce",
    "find_missing_average",
    "find_wrong_group",
    "find_missing_all_reduce_before_bias",
    "find_clip_factor",
    "find_gradient_norm",
    "find_own_statistics",
    "find_partial_sum",
    "find_double_reduction",
    "find_constant_factor",
    "find_others_values",
    "find_moved_values",
    "find_transposed_values",
    "find_bias",
    "find_wrong_rows",
    "find_uneven_weights",
    "find_wrong_lookup",
    "find_stale_input",
    "find_miscounted_microbatches",
    "find_backward_left_out",
    "find_other_step_count",
    "find_weaker_dtype",
    "find_wrong_ranks",
    "find_tied_copies",
    "find_differing_replicas",
    "find_misdirected_message",
]
"""The functions that verdicts depend on; others may come between them."""


def test_every_name_is_registered() -> None:
    assert {cause.name for cause in all_causes()} == set(CauseName)


def test_the_order_is_kept() -> None:
    names = [detector.__name__ for detector in detectors()]
    assert [name for name in names if name in ORDER] == ORDER


@pytest.mark.parametrize("cause", all_causes(), ids=lambda cause: f"{cause.name.value}-{cause.after}")
def test_every_cause_is_proven_or_says_why_not(cause: RegisteredCause) -> None:
    faults = {fault.name: fault.cause for fault in CATALOGUE}
    if cause.fault:
        assert faults[cause.fault] is cause.name
    elif cause.bug:
        assert bugs()[cause.bug].expected.cause == cause.name.value
    else:
        why, _, test = cause.unproven.partition("; ")
        assert why
        assert (ROOT / test).is_file(), "a unit test shows it"


def test_every_fault_names_a_cause_that_is_registered() -> None:
    assert {fault.cause for fault in CATALOGUE} <= {cause.name for cause in all_causes()}


def test_a_cause_needs_a_proof_and_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="state one proof"):
        RegisteredCause(CauseName.BIAS, "a row")
    monkeypatch.setattr(registry, "_DETECTORS", {})
    register = registry.cause(CauseName.BIAS, after="find_nothing", shown_by="a row", fault="bias on every rank")
    register(lambda _evidence: None)
    with pytest.raises(AssertionError, match="no function that finds a cause is called find_nothing"):
        registry._sort(registry._DETECTORS.items())
    assert FIRST == ""


def test_the_docs_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
