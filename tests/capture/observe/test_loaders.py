"""What the last loader of a thread draws."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from ttrace.capture.observe.loaders import count_samples, watch_last_loader
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
