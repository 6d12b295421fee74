"""Inputs that once failed, and those that fuzzing starts from, do not fail."""

from __future__ import annotations

import pytest

from fuzz.meter import Meter
from fuzz.target import CORPUS, NAMES, load_target


@pytest.mark.parametrize("name", NAMES)
def test_no_kept_input_fails(name: str) -> None:
    target, meter = load_target(name), Meter()
    inputs = {path.name: path.read_bytes() for path in sorted((CORPUS / name).glob("*"))}
    inputs |= {f"seed {number}": data for number, data in enumerate(target.make_seeds())}
    assert inputs
    failures = {which: failure for which, data in inputs.items() if (failure := meter.run(target.run, data))}
    assert not failures
