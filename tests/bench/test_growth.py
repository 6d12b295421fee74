"""The measurement of growth, on a small model and a few ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.growth import find_slope, measure_ranks, measure_size


def test_a_small_model_is_traced_and_judged(tmp_path: Path) -> None:
    found = measure_size(40_000, tmp_path)
    assert found["parameters"] == 40_000
    assert found["disk bytes"] >= 3 * 4 * 40_000  # gradients, parameters after the step, and activations
    assert found["traced step s"] > found["bare step s"] > 0.0


def test_the_trace_of_two_ranks_is_planned(tmp_path: Path) -> None:
    assert measure_ranks(2, tmp_path)["ranks"] == 2


def test_a_slope_is_the_exponent() -> None:
    rows = [{"size": 10.0**power, "cost": 3 * 10.0 ** (2 * power)} for power in range(4)]
    assert find_slope(rows, "size", "cost") == pytest.approx(2.0)
