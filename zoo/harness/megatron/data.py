"""Batches by the global index of a sample, so that all layouts train on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from zoo.harness.megatron.case import Case

Batch = dict[str, torch.Tensor]
Change = Callable[[Batch], Batch]


def microbatches(case: Case, step: int, rank: int, num_ranks: int) -> Iterator[Batch]:
    """Those of one data-parallel rank: ranks take turns, as Megatron's sampler does it."""
    for start in range(rank * case.micro, case.samples, num_ranks * case.micro):
        yield microbatch(case, step, range(start, start + case.micro))


def num_microbatches(case: Case, num_ranks: int) -> int:
    number, rest = divmod(case.samples, case.micro * num_ranks)
    assert not rest, f"{case.samples} samples on {num_ranks} ranks with {case.micro} in a microbatch"
    return number


def microbatch(case: Case, step: int, samples: range) -> Batch:
    """Whole sequences, as a dataset gives them."""
    text = torch.stack([_text(case, step, sample) for sample in samples])
    positions = torch.arange(case.length)
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": torch.stack([_mask(case, step, sample) for sample in samples]),
        "position_ids": positions.repeat(len(samples), 1),
        "attention_mask": (positions > positions[:, None])[None, None],  # true where one must not look
    }


def _text(case: Case, step: int, sample: int) -> torch.Tensor:
    return torch.randint(case.vocab, (case.length + 1,), generator=_generator(step, sample))


def _mask(case: Case, step: int, sample: int) -> torch.Tensor:
    share = 0.7 if case.masked else 1.0
    return (torch.rand(case.length, generator=_generator(step, sample)) < share).float()


def _generator(step: int, sample: int) -> torch.Generator:
    return torch.Generator().manual_seed(1 + 100_003 * step + sample)
