"""Limits of older versions of torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ttrace.compat.torch import parse_release


@dataclass(frozen=True)
class Limit:
    """Something that does not work, or not fully, in versions of torch below one."""

    feature: str
    below: tuple[int, int]
    """The first version, as major and minor number, that does not have this limit."""
    reason: str
    since: tuple[int, int] = (2, 6)
    """The first version that has it."""


LIMITS: tuple[Limit, ...] = (
    Limit("torch.distributed.pipelining", (2, 8), "its schedules hang"),
    Limit("torch.distributed.pipelining on gloo", (2, 10), "its messages have other sizes, and it crashes", (2, 9)),
    Limit("FSDP2 on CPU", (2, 7), "it crashes in torch"),
    Limit("uneven strided shards", (2, 8), "_StridedShard cuts evenly only"),
    Limit("averages of FSDP2 on CPU", (2, 9), "gloo ignores AVG, and TTrace rightly reports too large gradients"),
)
"""Limits since 2.6; `ttrace doctor` lists those of the version that runs."""


def list_limits(version: str = torch.__version__) -> tuple[Limit, ...]:
    """List the limits of a version of torch, such as `2.6.0+cu124`. See `LIMITS`."""
    return tuple(limit for limit in LIMITS if limit.since <= parse_release(version) < limit.below)
