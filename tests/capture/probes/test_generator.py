"""What generated data look like: the shapes and ranges of the script's own, and the edges of its tables."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ttrace.capture.probes.generator import is_computed, measure_batch, measure_parameters
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


@pytest.mark.parametrize(("class_count", "limit"), [(50, 50), (40, 0), (64, 0), (1000, 0)])
def test_ids_have_a_class_where_the_vocabulary_is_padded(class_count: int, limit: int) -> None:
    assert measure_batch(torch.tensor([[3, 40, 7]]), {64}, {class_count}) == Rows(64, limit=limit)
    assert measure_batch(torch.tensor([[3, 40, -1]]), {64}, {class_count}) == Rows(64, 2 / 3, -1, limit)


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


def make_sinusoids(num_positions: int, width: int) -> torch.Tensor:
    angles = torch.arange(num_positions)[:, None] * 1e4 ** (-torch.arange(width // 2) / (width // 2))
    return torch.cat([angles.sin(), angles.cos()], -1)


@pytest.mark.parametrize(
    "tensor",
    [
        make_sinusoids(16, 32),
        make_sinusoids(2048, 64).to(torch.bfloat16)[None],
        torch.ones(16, 16).triu(1) * -1e4,
        torch.full((16, 16), -torch.inf).triu(1),
        torch.arange(512.0),
    ],
    ids=["sinusoids", "many-sinusoids", "mask", "mask-of-infinities", "positions"],
)
def test_tables_and_masks_are_computed(tensor: torch.Tensor) -> None:
    assert is_computed(tensor)


@pytest.mark.parametrize("shape", [(4,), (12,), (3, 5), (16, 16), (64, 3, 3), (1024, 128)])
def test_random_numbers_and_constants_are_not_computed(shape: tuple[int, ...]) -> None:
    for seed in range(100):
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        assert not is_computed(drawn)
        assert not is_computed(drawn.sign())
    for value in (0.0, 1.0, 0.1, torch.inf, torch.nan):
        assert not is_computed(torch.full(shape, value))
    assert not is_computed(torch.empty(shape, device="meta"))
    assert not is_computed(torch.zeros(0))
