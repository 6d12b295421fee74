"""A source gives any part of a parameter as the whole has it, whichever thread generates it."""

from __future__ import annotations

import time

import pytest
import torch

from ttrace.large_references.parameter_source import KeptValues, ParameterSource, Scratch, StreamProgress
from ttrace.layouts.region import Region
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


# Values are kept up to a limit, the latest ones, and never overwritten while an operator may read them.


def read(kept: KeptValues, number: int) -> torch.Tensor:
    """Read a parameter of four numbers, each of which is its own."""
    found = kept.read(number, 4, torch.float32, torch.device("cpu"), lambda out: out.fill_(number))
    assert found is not None
    return found


def test_arguments_of_one_operator_do_not_overwrite_each_other() -> None:
    kept = KeptValues(max_bytes=2 * 16)
    values = [read(kept, number) for number in range(6)]
    assert [float(value[0]) for value in values] == [0, 1, 2, 3, 4, 5]


def test_more_than_the_limit_is_not_kept() -> None:
    kept = KeptValues(max_bytes=8)
    assert kept.read(0, 4, torch.float32, torch.device("cpu"), lambda out: out.fill_(1)) is None


def test_backward_gets_each_value_once() -> None:
    kept = KeptValues(max_bytes=1 << 20)
    seen: list[float | None] = []
    weight = torch.ones(4, requires_grad=True)

    class Use(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return x * read(kept, 3)

        @staticmethod
        def backward(_ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                again = kept.read(3, 4, torch.float32, torch.device("cpu"), lambda out: out.fill_(7))
                seen.append(None if again is None else float(again[0]))
            return gradient

    Use.apply(weight).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [3.0, None]


# A long step says how far it is, and not more often than it should.


def test_a_step_says_its_share_and_the_time_left() -> None:
    said: list[str] = []
    progress = StreamProgress(100, write=said.append, interval=0.0)
    time.sleep(0.01)
    progress.on_read(60)
    progress.on_gradient(30)
    assert said[0].startswith("ttrace: streamed 20% of the step, about 0 s left")
    assert said[1].startswith("ttrace: streamed 40% of the step")


def test_a_short_step_says_nothing() -> None:
    said: list[str] = []
    progress = StreamProgress(100, write=said.append)
    for _ in range(100):
        progress.on_read(1)
    assert said == []


def test_each_step_begins_at_nothing() -> None:
    said: list[str] = []
    progress = StreamProgress(100, 2, said.append, interval=0.0)
    for _ in range(2 * 2):
        progress.on_read(100)
        progress.on_gradient(100)
    shares = [int(line.split()[2].rstrip("%")) for line in said]
    assert shares == [17, 50, 67, 100] * 2
