"""What generated data look like: the shapes and ranges of the script's own, and the edges of its tables."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ttrace.capture.probes.generator import measure_batch, measure_parameters
from ttrace.capture.resolve.names import Names
from ttrace.values.generate import Distribution, Integers, Normal, Rows


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([[3, 61, 40]], Rows(64)),
        ([[3, -100, 40]], Rows(64, keep=2 / 3)),
        ([[3, 1, 20]], Integers(1, 21)),  # in the first half of the table: something else may be meant
        ([[3, 65, 40]], Integers(3, 66)),  # beyond it
        ([[0, 1, 0]], Rows(2)),  # the smallest table that fits
        ([[0, 1, 2, 3], [2, 3, 0, 1]], None),  # positions in documents, which random numbers would destroy
        ([[0, 1, 3, 0]], Integers(0, 4)),
    ],
)
def test_integers_that_reach_into_a_table_are_its_rows(data: list[list[int]], expected: Distribution | None) -> None:
    assert measure_batch(torch.tensor(data), {64, 2}) == expected


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_a_mask_of_infinities_is_kept_and_an_uninitialised_parameter_gets_finite_values(value: float) -> None:
    data = torch.zeros(4, 4)
    data[0, 1] = value
    assert measure_batch(data) is None
    assert measure_parameters([data, torch.ones(3)]) == [Normal(0.0, 0.02), Normal(1.0, 0.02)]


def test_tables_are_found_by_what_embeddings_call_their_length() -> None:
    own = nn.Module()
    own.num_embeddings = 128  # type: ignore[assignment]  # as Megatron's has it
    model = nn.Sequential(nn.Embedding(61, 4), nn.Linear(4, 4), own)
    assert Names([model]).list_table_lengths() == {61, 128}
