"""Contract of an adapter: what TTrace must know of a framework.

Every member has a default that is right for plain PyTorch modules and optimizers, so a new framework overrides only
what it does in another way: as a rule `recognizes`, `mesh`, `name`, `find_rule` and `attach`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ttrace.adapters.events import FrameworkEvents
from ttrace.adapters.wrappers import find_canonical_name
from ttrace.errors import CaptureError
from ttrace.layouts.placement import Placement
from ttrace.layouts.rules import Rule
from ttrace.patches import Patches
from ttrace.tensors.ids import ROOT, Kind, Site
from ttrace.tensors.mesh import Coord, Mesh

ANONYMOUS_AXIS = "ranks"
"""The axis of a job of which nothing is known but its number of ranks."""

Optimizer = Any
"""An optimizer of torch, or what a framework has in its place."""


@dataclass(frozen=True)
class OwnedSlice:
    """What a rank keeps for a parameter: shaped like its own part of it, or a run of that part, flattened."""

    tensor: torch.Tensor
    run: tuple[int, int] | None = None


@dataclass(frozen=True)
class Share:
    """The rows of a tensor that belong to one microbatch, and where they lie in that microbatch's own tensor."""

    microbatch: int
    rows: torch.Tensor
    placement: Placement


Recall = Callable[[Site, int], "torch.Tensor | None"]
"""What the reference had at a site and microbatch, in this step."""


class Handle(Protocol):
    """Something that ends when it is removed."""

    def remove(self) -> None: ...


class Adapter:
    """Everything that a framework's model and optimizer say of themselves on this rank."""

    rank: int = 0

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: Optimizer | None = None,  # noqa: ARG002
        *,
        mesh: Mesh | str | None = None,
    ) -> None:
        """`chunks` are the model, or this rank's pipeline stages; `mesh` is what the script gave to attach, if any.

        A subclass that overrides this sets `rank`, `chunks`, `mesh` and `coord`.
        """
        self.rank, num_ranks = find_rank_and_world()
        self.chunks = chunks
        self.mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh or make_anonymous_mesh(num_ranks)
        check_mesh(self.mesh, num_ranks)
        self.coord = self.mesh.coord(self.rank)

    # Which models it is for

    @classmethod
    def recognizes(cls, chunks: Sequence[nn.Module]) -> bool:  # noqa: ARG003
        """Say whether this adapter is for these modules. It must not import the framework: who uses it has done so."""
        return False

    # Where this rank sits

    chunks: Sequence[nn.Module]
    """The model, or this rank's pipeline stages."""
    mesh: Mesh
    """All ranks of the job, from the framework's own process groups."""
    coord: Coord
    """This rank's place in the mesh."""

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks run microbatches of their own."""
        return ("dp",) if "dp" in self.mesh.sizes else ()

    @property
    def distributing_axes(self) -> frozenset[str]:
        """The axes along which ranks have microbatches or modules of their own: they cut no tensor by themselves."""
        return frozenset((*self.data_axes, "pp")) & set(self.mesh.sizes)

    @property
    def reduced_axes(self) -> frozenset[str]:
        """The axes over which the framework itself reduces gradients: along them all ranks get the same bits."""
        return frozenset()

    @property
    def grad_factor(self) -> float:
        """What the framework's reduction over ranks will still multiply gradients by, for instance 1/dp."""
        return 1.0

    # What things are called, and what is traced

    def name(self, chunk: nn.Module, path: str) -> str:
        """What the reference calls the module, parameter or buffer at this path of a chunk."""
        return find_canonical_name(path, chunk)

    @property
    def divided(self) -> frozenset[str]:
        """The modules of which each stage of a pipeline has a part, under the same name."""
        return frozenset({ROOT})

    @property
    def untraced(self) -> frozenset[Kind]:
        """The kinds that the reference may have, but this run cannot show."""
        return frozenset()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the report should know."""
        return ()

    def is_watched(self, name: str, *, isolated: bool) -> bool:  # noqa: ARG002
        """Whether this module's calls are traced, and may be isolated; its parameters always are."""
        return True

    # Layouts

    def read_placement(self, tensor: torch.Tensor) -> Placement | None:  # noqa: ARG002
        """Read the layout that the tensor itself states, as a DTensor does; None if it states none."""
        return None

    def find_rule(self, site: Site, num_dims: int) -> Rule | None:  # noqa: ARG002
        """Find the layout that the framework states for a tensor of so many dims at a site; None if it states none."""
        return None

    def split_rows(self, site: Site, tensor: torch.Tensor, number: int, recall: Recall) -> Sequence[Share] | None:  # noqa: ARG002
        """Split a tensor that has rows of several microbatches; None for any other tensor.

        `number` is how many microbatches this rank has run before.
        """
        return None

    def find_disagreements(self, parameters: Mapping[str, Placement]) -> Iterable[str]:  # noqa: ARG002
        """Say in words where the framework itself says of a parameter that it lies elsewhere."""
        return ()

    # What happens

    def attach(self, events: FrameworkEvents) -> None:
        """Report to `events` what only the framework knows, such as a pipeline's microbatches and its loss.

        Make patches through `self.patches`, so that `detach` puts them back.
        """

    def detach(self) -> None:
        """Put back everything that this adapter has patched, the last patch first."""
        self.patches.remove()

    @cached_property
    def patches(self) -> Patches:
        """This adapter's patches of the framework."""
        return Patches()

    # The optimizer

    def on_parameters_replaced(self, optimizer: Optimizer | None) -> None:
        """Parameters have other values now. Refresh every copy that the optimizer keeps of them."""

    def find_torch_optimizers(self, optimizer: Optimizer | None) -> Sequence[torch.optim.Optimizer]:
        """Find the optimizers of torch that do this one's work, and hold its state."""
        # ZeroRedundancyOptimizer keeps an optimizer of its own for this rank's share; importing it warns.
        inner = ((each, getattr(each, "optim", None)) for each in list_optimizers(optimizer))
        return [own if isinstance(own, torch.optim.Optimizer) else each for each, own in inner]

    def find_groups(
        self, optimizer: Optimizer | None, parameters: Iterable[nn.Parameter]
    ) -> Iterable[tuple[nn.Parameter, Mapping[str, object]]]:
        """Find those of the parameters that this rank's optimizer updates, each with its group of settings."""
        known = {
            id(parameter): group
            for each in self.find_torch_optimizers(optimizer)
            for group in read_groups(each)
            for parameter in group["params"]
        }
        return ((parameter, known[id(parameter)]) for parameter in parameters if id(parameter) in known)

    def watch_steps(
        self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]
    ) -> Sequence[Handle]:
        """Call `before` and `after` around each step of the optimizer, until the handles are removed."""
        return [
            handle
            for each in list_optimizers(optimizer)
            for handle in (
                each.register_step_pre_hook(lambda *_: before()),
                each.register_step_post_hook(lambda *_: after()),
            )
        ]

    # Values

    def read_values(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a parameter's own memory, in the shape that its layout speaks of."""
        return parameter.detach()

    def read_gradient(self, parameter: nn.Parameter) -> OwnedSlice | None:
        """Return the gradient that the optimizer will use, as far as this rank has it."""
        return None if parameter.grad is None else OwnedSlice(parameter.grad)

    def read_updated(self, parameter: nn.Parameter) -> OwnedSlice | None:
        """Return what a step left of a parameter, as far as this rank has it already."""
        return OwnedSlice(parameter.detach())

    def read_optimizer_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, OwnedSlice]:
        """Return what the optimizer keeps for a parameter on this rank; nothing where another rank keeps it."""
        states = (keeper.state.get(parameter, {}) for keeper in self.find_torch_optimizers(optimizer))
        state: Mapping[str, object] = next(filter(None, states), {})
        return {str(key): OwnedSlice(value) for key, value in state.items() if isinstance(value, torch.Tensor)}

    def to_full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the logical value of a scalar that every rank needs, such as the norm that clipping uses."""
        return tensor

    def to_local(self, tensor: torch.Tensor, site: Site | None = None) -> torch.Tensor:  # noqa: ARG002
        """Return this rank's values as a plain tensor, as they count at this site."""
        return tensor

    def with_local(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return a tensor that is distributed like the given one, with these values on this rank."""
        return local


def find_rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks; a launched job must have initialised its process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CaptureError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but no process group is initialised. "
            "Call ttrace.attach after torch.distributed.init_process_group."
        )
    return 0, 1


def check_mesh(mesh: Mesh, num_ranks: int) -> None:
    """Refuse a mesh of another number of ranks than the job has."""
    if mesh.num_ranks != num_ranks:
        raise CaptureError(
            f"mesh {str(mesh)!r} has {mesh.num_ranks} ranks, but {num_ranks} run. Give attach(mesh=...) "
            "all axes of the job, slowest first; a single process needs none."
        )


def make_anonymous_mesh(num_ranks: int) -> Mesh:
    """Make the mesh of a job of which only the number of ranks is known."""
    return Mesh.of(**{ANONYMOUS_AXIS: num_ranks}) if num_ranks > 1 else Mesh()


def list_optimizers(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Any]:
    """List what a script gave as its optimizer: none, one, or several."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def read_groups(optimizer: Optimizer) -> Sequence[Mapping[str, Any]]:
    """Read an optimizer's groups of parameters that are like torch's; none where it has no such thing."""
    groups = getattr(optimizer, "param_groups", ())
    return [group for group in groups if isinstance(group, Mapping) and isinstance(group.get("params"), Iterable)]
