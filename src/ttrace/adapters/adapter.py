"""This module says what TTrace must know of a framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ttrace.layouts.placed import Placed
from ttrace.layouts.rules import Rule
from ttrace.tensors.ids import Kind, Site
from ttrace.tensors.mesh import Coord, Mesh

ANONYMOUS_AXIS = "ranks"
"""The axis of a job of which nothing is known but its number of ranks."""

Optimizer = Any
"""An optimizer of torch, or what a framework has in its place."""


@dataclass(frozen=True)
class Piece:
    """What a rank keeps for a parameter: shaped like its own part of it, or a run of that part, flattened."""

    tensor: torch.Tensor
    run: tuple[int, int] | None = None


@dataclass(frozen=True)
class Share:
    """The rows of a tensor that belong to one microbatch, and where they lie in that microbatch's own tensor."""

    microbatch: int
    rows: torch.Tensor
    placed: Placed


Recall = Callable[[Site, int], "torch.Tensor | None"]
"""What the reference had at a site and microbatch, in this step."""


def groups_of(optimizer: Optimizer) -> Sequence[Mapping[str, Any]]:
    """An optimizer's groups of parameters that are like torch's; none where it has no such thing."""
    groups = getattr(optimizer, "param_groups", ())
    return [group for group in groups if isinstance(group, Mapping) and isinstance(group.get("params"), Iterable)]


class Handle(Protocol):
    """Something that ends when it is removed."""

    def remove(self) -> None: ...


class Listener(Protocol):
    """Who is told what only a framework knows."""

    def is_pipelined(self) -> None:
        """From now on only what happens in a chunk counts: a stage may run once before, to learn shapes."""

    def in_chunk(self, microbatch: int, *, is_first: bool, is_last: bool) -> AbstractContextManager[None]:
        """Around everything that is done for one microbatch in one stage."""

    def sees_loss(self, loss: torch.Tensor) -> None:
        """The loss that a backward starts from."""

    def sees_auxiliary_loss(self, loss: torch.Tensor) -> None:
        """A loss that the module which runs now adds to its own gradient."""

    def will_divide(self, divisor: int) -> None:
        """After the last microbatch, gradients will be divided by this."""

    def sees_main_gradients(self, gradients: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """In these gradients all microbatches of this rank are added up, and no other rank's yet."""

    def hears_norm(self, norm: torch.Tensor) -> None:
        """The norm of all gradients was taken."""

    def hears_clip(self, factor: torch.Tensor) -> None:
        """All gradients are about to be multiplied by this."""


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
    def reduced_axes(self) -> frozenset[str]:
        """The axes over which the framework itself reduces gradients: along them all ranks get the same bits."""

    @property
    def grad_factor(self) -> float:
        """What reducing over ranks will still apply to gradients."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the report should know."""

    def name(self, chunk: nn.Module, path: str) -> str:
        """What the reference calls the module, parameter or buffer at this path of a chunk."""

    @property
    def divided(self) -> frozenset[str]:
        """The modules of which each stage of a pipeline has a part, under the same name."""

    @property
    def untraced(self) -> frozenset[Kind]:
        """The kinds that the reference may have, but this run cannot show."""

    def watches(self, name: str, *, isolated: bool) -> bool:
        """Whether this module's calls are traced, and may be isolated; its parameters always are."""

    def listen(self, listener: Listener) -> None:
        """Tell the listener what only the framework knows: microbatches of a pipeline, its loss."""

    def placed(self, tensor: torch.Tensor) -> Placed | None:
        """The layout that the tensor itself states, or None."""

    def rule(self, site: Site, num_dims: int) -> Rule | None:
        """The layout that the framework's own plan states for a tensor of so many dims at a site, or None."""

    def shares(self, site: Site, tensor: torch.Tensor, number: int, recall: Recall) -> Sequence[Share] | None:
        """By microbatch, the rows of a tensor that has rows of several; None for any other.

        `number` is how many microbatches this rank has run before.
        """

    def disagreements(self, parameters: Mapping[str, Placed]) -> Iterable[str]:
        """In words, where the framework itself says of a parameter that it lies elsewhere."""

    def parameters_replaced(self, optimizer: Optimizer | None) -> None:
        """Parameters have other values now: whoever keeps copies must take them."""

    def steppers(self, optimizer: Optimizer | None) -> Sequence[torch.optim.Optimizer]:
        """The optimizers of torch that do this one's work, in which its state lies."""

    def groups(
        self, optimizer: Optimizer | None, parameters: Iterable[nn.Parameter]
    ) -> Iterable[tuple[nn.Parameter, Mapping[str, object]]]:
        """Those of the parameters that this rank's optimizer updates, each with its group of settings."""

    def watch_steps(
        self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]
    ) -> Sequence[Handle]:
        """Tell before and after each step of the optimizer, until the handles are removed."""

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's own memory, in the shape that its layout speaks of."""

    def gradient(self, parameter: nn.Parameter) -> Piece | None:
        """The gradient that the optimizer will use, as far as this rank has it."""

    def updated(self, parameter: nn.Parameter) -> Piece | None:
        """What a step left of a parameter, as far as this rank has it already."""

    def optimizer_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, Piece]:
        """What the optimizer keeps for a parameter on this rank; nothing where another rank keeps it."""

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The logical value of a scalar that every rank needs, as clipping does."""

    def local(self, tensor: torch.Tensor, site: Site | None = None) -> torch.Tensor:
        """This rank's values as a plain tensor, as they count at this site."""

    def with_local(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """A tensor that is distributed like the given one, with these values on this rank."""
