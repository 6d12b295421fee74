"""Values are read in parts of any kind, whatever the shards; projections keep what is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor
from ttrace.judge.tensors import values
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.tensors.values import Values
from ttrace.layouts.ids import TensorId

ID = "0/0/fc/output"
FULL = draw_tensor(6, 5, 8)


@pytest.fixture(params=["a b c", "a/tp b c", "a b c/tp", "a b c +tp"])
def held(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Values:
    monkeypatch.setattr(values, "BLOCK", 16)
    case = Case(tmp_path)
    case.add(ID, FULL, request.param)
    found = LogicalTensor.of(case.candidate.close(), TensorId.parse(ID))
    assert found is not None
    return Values(found, 2.0)


def test_blocks_rows_and_elements(held: Values) -> None:
    full = 2.0 * FULL.double()
    for bounds in held.cut():
        torch.testing.assert_close(held.read(bounds), full[tuple(slice(*run) for run in bounds)], rtol=1e-6, atol=0)
    rows = torch.tensor([4, 1, 1])
    read = held.read_rows(((0, 6), (0, 5), (2, 4)), 1, rows)
    torch.testing.assert_close(read, full[:, rows, 2:4], rtol=1e-6, atol=0)
    at = torch.tensor([0, 239, 17, 100])
    torch.testing.assert_close(held.read_elements(at), full.flatten()[at], rtol=1e-6, atol=0)


def test_sums_over_rows(held: Values) -> None:
    sums = values.sum_rows(held, held)
    for dim in range(3):
        expected = (2.0 * FULL.double()).square().movedim(dim, 0).flatten(1).sum(1)
        torch.testing.assert_close(sums[dim].aa, expected, rtol=1e-6, atol=0)
        assert not sums[dim].dd.any()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_projected_rows_are_as_far_apart_as_the_rows(held: Values, dim: int) -> None:
    rows = (2.0 * FULL.double()).movedim(dim, 0).flatten(1)
    as_they_are = values.project(held, dim, rows.shape[1])
    torch.testing.assert_close(as_they_are, rows, rtol=1e-6, atol=0)
    found = values.project(held, dim, 20)
    assert found.shape == (len(rows), 20)
    ratio = (found[0] - found[1]).norm() / 20**0.5 / (rows[0] - rows[1]).norm()
    assert 0.4 < ratio < 2.5


def test_a_product_is_projected_without_being_made(held: Values) -> None:
    flat = (2.0 * FULL.double()).flatten(0, -2)
    product = flat.T @ flat
    torch.testing.assert_close(values.project_product(held, held, 8), product, rtol=1e-5, atol=1e-5)  # as it is
    directions = values.project_last(held, 3)
    torch.testing.assert_close(values.project_product(held, held, 3), flat.T @ directions, rtol=1e-5, atol=1e-5)
