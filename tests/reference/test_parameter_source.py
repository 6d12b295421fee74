"""A source gives any part of a parameter as the whole has it, whichever thread generates it."""

from __future__ import annotations

import pytest
import torch

from ttrace.large_references.parameter_source import ParameterSource, Scratch
from ttrace.layouts.region import Region
from ttrace.reference.progress import StreamProgress
from ttrace.values.generate import Normal, generate_values


def source(*shape: int) -> ParameterSource:
    return ParameterSource(shape, torch.bfloat16, torch.device("cpu"), "weight", Normal(), Scratch(), StreamProgress(1))


def whole(*shape: int) -> torch.Tensor:
    made = generate_values("weight", Region.whole(shape), dtype=torch.bfloat16, distribution=Normal())
    return made.reshape(-1)


@pytest.mark.parametrize("cut", [(0, 60), (12, 36), (7, 41), (59, 60)])
def test_a_run_is_that_of_the_whole(cut: tuple[int, int]) -> None:
    out = torch.empty(cut[1] - cut[0], dtype=torch.bfloat16)
    assert torch.equal(source(5, 3, 4).generate_run(*cut, out), whole(5, 3, 4)[slice(*cut)])


def test_threads_make_what_one_makes() -> None:
    """Also where the first row is not whole."""
    shape, before = (1001, 1500), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for cut in ((0, 1001 * 1500), (700, 1001 * 1500 - 1)):
            out = torch.empty(cut[1] - cut[0], dtype=torch.bfloat16)
            assert torch.equal(source(*shape).generate_run(*cut, out), whole(*shape)[slice(*cut)])
    finally:
        torch.set_num_threads(before)


def test_rows_are_those_of_the_whole() -> None:
    index = torch.tensor([0, 3, 4])
    assert torch.equal(source(5, 3, 4).generate_rows(index), whole(5, 3, 4).view(5, 3, 4)[index])


def test_scratch_memory_is_the_same_until_it_must_grow() -> None:
    scratch, device = Scratch(), torch.device("cpu")
    first = scratch.memory(0, 8, torch.float32, device)
    assert scratch.memory(0, 16, torch.bfloat16, device).data_ptr() == first.data_ptr()
    assert scratch.memory(1, 8, torch.float32, device).data_ptr() != first.data_ptr()
    assert scratch.holds(first[3:])
    assert not scratch.holds(torch.empty(8))
    assert scratch.memory(0, 64, torch.float32, device).numel() == 64
