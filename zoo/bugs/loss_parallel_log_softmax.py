"""loss_parallel: a log-softmax that no cross entropy consumes gets the identity for its gradient.

Inside `loss_parallel()` torch replaces the backward of log-softmax and trusts that nll_loss made the whole gradient. A
loss written with log-softmax itself, as label smoothing or distillation are, passes its gradient on unchanged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.small import small


def by_log_softmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = logits.flatten(0, 1)
    target = F.one_hot(labels.flatten(), rows.shape[1]).to(rows.dtype)
    if isinstance(rows, DTensor):
        target = distribute_tensor(target, rows.device_mesh, rows.placements)
    return -(F.log_softmax(rows, -1) * target).sum() / len(rows)


BUG = Bug(
    tier=Tier.T1,
    topic=Topic.DATA,
    package="torch 2.13.0",
    sources=("https://github.com/pytorch/pytorch/issues/190746",),
    case=small("tp+loss", loss=by_log_softmax),
    clean_case=small("tp+loss"),
    expected=Expected(
        ".",
        "grad_output",
        "backward left out",
        words="log-softmax",
        line="F.log_softmax(rows, -1)",
        operation="log_softmax",
    ),
    since=(2, 8),
)
