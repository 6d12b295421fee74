"""megatron-core 0.16.1: with two stages and several chunks, gradients arrive as activations.

`_batched_p2p_ops` posts a send to and a receive from the previous stage, then the same with the next. With two stages
both are one rank, which sends a gradient first where an activation is awaited, both of one shape: messages are
swapped. The clean side posts receives in the order in which the other stage sends. docs/found/batched-p2p.md says
more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.released import dense

CASE = dense(pp=2, vpp=2, layers=4, batched_p2p=True)


@contextmanager
def received_as_sent(_: object) -> Iterator[None]:
    """Receives are posted in the order in which the only other stage sends: gradients first."""
    posted = dist.batch_isend_irecv

    def reordered(operations: list[Any]) -> Any:
        sends = [operation for operation in operations if operation.op is dist.isend]
        receives = [operation for operation in operations if operation.op is dist.irecv]
        return posted([*sends, *reversed(receives)])

    with mock.patch.object(dist, "batch_isend_irecv", reordered):
        yield


BUG = Bug(
    tier=Tier.T1,
    topic=Topic.WRONG_COMMUNICATION,
    package="megatron-core 0.16.1",
    sources=(
        "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/pipeline_parallel/p2p_communication.py",
    ),
    case=CASE,
    clean_patch=received_as_sent,
    expected=Expected(
        "decoder",
        "grad_input",
        "another's values",
        words="what arrived is 0/2/decoder.layers.0/output.0 of the reference",
    ),
)
