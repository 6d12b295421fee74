"""Bits are flipped and runs are killed; no verdict may change."""

from __future__ import annotations

import pytest

from bench.damage import main


@pytest.mark.nightly  # tests/faults/test_damage.py flips bits in each submission
def test_no_answer_is_wrong_after_a_few_flipped_bits_and_kills() -> None:
    assert main("--quick") == 0


@pytest.mark.nightly
@pytest.mark.timeout(12 * 3600)
def test_no_answer_is_wrong_after_many_flipped_bits_and_kills() -> None:
    assert main() == 0
