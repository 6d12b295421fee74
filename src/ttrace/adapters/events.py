"""Events that only a framework knows of, as an adapter reports them to the session."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


class FrameworkEvents:
    """Events that an adapter reports while a framework trains. A subclass overrides those that it needs."""

    def on_pipeline(self) -> None:
        """A pipeline is about to run. From now on only chunks count: a stage may run once before, to find shapes."""

    def on_chunk(self, microbatch: int, *, is_first: bool, is_last: bool) -> AbstractContextManager[None]:
        """A stage works on one microbatch. The adapter enters the returned context around all of this work."""
        del microbatch, is_first, is_last
        return nullcontext()

    def on_loss(self, loss: torch.Tensor) -> None:
        """A backward pass is about to start from this loss."""

    def on_auxiliary_loss(self, loss: torch.Tensor) -> None:
        """The module that runs now adds this loss to its own gradient."""

    def on_divide(self, divisor: int) -> None:
        """After the last microbatch, gradients will be divided by this number."""

    def on_main_gradients(self, gradients: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """These gradients are the sums over this rank's microbatches, before those of other ranks are added."""

    def on_grad_norm(self, norm: torch.Tensor) -> None:
        """The norm of all gradients was computed."""

    def on_clip(self, factor: torch.Tensor) -> None:
        """All gradients are about to be multiplied by this factor."""
