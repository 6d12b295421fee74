"""This module says what TTrace must know of a framework."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ttrace.layouts.placed import Placed
from ttrace.layouts.rules import Rule
from ttrace.tensors.ids import Site
from ttrace.tensors.mesh import Coord, Mesh


class Listener(Protocol):
    """Who is told what a pipeline does."""

    def is_pipelined(self) -> None:
        """From now on only what happens in a chunk counts: a stage may run once before, to learn shapes."""

    def in_chunk(self, microbatch: int, *, is_first: bool, is_last: bool) -> AbstractContextManager[None]:
        """Around everything that is done for one microbatch in one stage."""

    def sees_loss(self, loss: torch.Tensor) -> None:
        """The loss that a backward starts from."""

    def will_divide(self, divisor: int) -> None:
        """After the last microbatch, gradients will be divided by this."""


class Adapter(Protocol):
    """Where this rank sits, what a live tensor says of its own layout, and how to reach its local values."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def coord(self) -> Coord: ...

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks run microbatches of their own."""

    @property
    def distributing_axes(self) -> frozenset[str]:
        """The axes along which ranks have microbatches or modules of their own: they cut no tensor by themselves."""

    @property
    def grad_factor(self) -> float:
        """What reducing over ranks will still apply to gradients."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the report should know."""

    def watches(self, name: str) -> bool:
        """Whether this module's calls are traced; its parameters always are."""

    def listen(self, listener: Listener) -> None:
        """Tell the listener what only the framework knows: microbatches of a pipeline, its loss."""

    def placed(self, tensor: torch.Tensor) -> Placed | None:
        """The layout that the tensor itself states, or None."""

    def rule(self, site: Site) -> Rule | None:
        """The layout that the framework's own plan states for a site, or None."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, object]:
        """What the optimizer keeps for a parameter on this rank; nothing where another rank keeps it."""

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The logical value of a scalar that every rank needs, as clipping does."""

    def local(self, tensor: torch.Tensor, site: Site | None = None) -> torch.Tensor:
        """This rank's values as a plain tensor, as they count at this site."""

    def with_local(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """A tensor that is distributed like the given one, with these values on this rank."""
