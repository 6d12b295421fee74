"""What the last loader of a thread draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from ttrace.capture.observe.loaders import count_samples, read_further_batches, watch_last_loader
from ttrace.patches import Patches

ROWS = TensorDataset(torch.zeros(8, 2))


@pytest.fixture(autouse=True)
def watching() -> Iterator[None]:
    patches = Patches()
    watch_last_loader(patches)
    yield
    patches.remove()


def test_a_loader_without_a_sampler_of_its_own_draws_all_samples() -> None:
    distributed: DistributedSampler[Any] = DistributedSampler(ROWS, num_replicas=2, rank=0)
    for loader, expected in (
        (DataLoader(ROWS, 2), 8),
        (DataLoader(ROWS, 2, shuffle=True), 8),
        (DataLoader(ROWS, 2, num_workers=1), 8),
        (DataLoader(ROWS, 2, sampler=distributed), 0),
        (DataLoader(ROWS, 2, sampler=RandomSampler(ROWS, replacement=True)), 0),
    ):
        running = iter(loader)
        next(running)
        assert count_samples() == expected


def test_a_loader_that_has_ended_is_forgotten() -> None:
    for _ in DataLoader(ROWS, 2):
        assert count_samples() == 8
    assert count_samples() == 0


def test_ranks_in_threads_have_loaders_of_their_own() -> None:
    running = iter(DataLoader(ROWS, 2))
    next(running)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(count_samples).result() == 0
    assert count_samples() == 8


class Drawn(Dataset[torch.Tensor]):
    """A dataset that draws random numbers, and may fail."""

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._fails and index > 3:
            raise RuntimeError("no such sample")
        random.random()
        return torch.rand(2) * 0 + index


def test_further_batches_change_nothing_for_the_script() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Drawn(), 2, shuffle=True, generator=generator)
    seen: list[list[torch.Tensor]] = []
    for reads in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        generator.manual_seed(3)
        running = iter(loader)
        batches = [next(running)]
        if reads:
            found = list(read_further_batches())
            assert sorted(int(row[0]) for batch in found for row in batch) == list(range(8))
        batches += [*running, torch.rand(2), torch.tensor(random.random()), torch.rand(1, generator=generator)]
        seen.append(batches)
    assert all(map(torch.equal, *seen))


def test_further_batches_of_a_dataset_that_fails_are_those_before() -> None:
    running = iter(DataLoader(Drawn(fails=True), 2))
    next(running)
    assert len(list(read_further_batches())) == 2


def test_a_stream_has_no_further_batches() -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.zeros(8, 2))

    running = iter(DataLoader(Stream(), 2))
    next(running)
    assert not list(read_further_batches())
    assert count_samples() == 0
