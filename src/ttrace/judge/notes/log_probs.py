"""Note on log-probabilities: how the chances of tokens differ between a trainer and its rollout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.verdict import Comparison
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace

_MODULE = "logprobs"
"""The name of a module that returns them."""
_MOST = 1 << 22
"""Of more tokens nothing is noted."""


def note_log_probs(comparisons: Iterable[Comparison], reference: Trace, candidate: Trace) -> Iterator[str]:
    """Say the mean ratio of the chances on both sides, and the token at which they differ most."""
    for comparison in comparisons:
        tensor_id = comparison.id
        if tensor_id.kind is not Kind.OUTPUT or tensor_id.name.rpartition(".")[2] != _MODULE:
            continue
        ours = LogicalTensor.of(reference, tensor_id)
        theirs = LogicalTensor.of(candidate, tensor_id, ours.shape if ours else None)
        if ours is None or theirs is None or ours.shape != theirs.shape or comparison.stats.count > _MOST:
            continue
        if ours.num_buckets or theirs.num_buckets or not comparison.stats.count:
            continue
        a, b = ours.tensor().double(), theirs.tensor().double()
        worst = (b - a).abs().argmax()
        index = list(map(int, torch.unravel_index(worst, ours.shape)))
        ratio, found, needed = float((b - a).exp().mean()), float(b.flatten()[worst]), float(a.flatten()[worst])
        yield (
            f"{tensor_id.name}: the candidate's chance of a token is on average {ratio:.6g} x the reference's; the "
            f"worst token is {index}, with {found:.6g} against {needed:.6g}"
        )
