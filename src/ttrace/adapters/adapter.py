"""Contract of an adapter: what TTrace must know of a framework.

Every member has a default that is right for plain PyTorch modules and optimizers, so a new framework overrides only
what it does in another way: as a rule `recognizes`, `mesh`, `name`, `find_rule` and `attach`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ttrace.adapters.events import FrameworkEvents
from ttrace.adapters.wrappers import find_canonical_name
from ttrace.errors import CaptureError
from ttrace.layouts.ids import ROOT, Kind, Site
from ttrace.layouts.mesh import Coord, Mesh
from ttrace.layouts.placement import Placement
from ttrace.layouts.region import Shape
from ttrace.layouts.rules import Rule
from ttrace.layouts.splits import NO_SPLITS, Split
from ttrace.patches import Patches

ANONYMOUS_AXIS = "ranks"
"""The axis of a job if only its number of ranks is known."""

Optimizer = Any
"""An optimizer of torch, or of the framework."""


@dataclass(frozen=True)
class OwnedSlice:
    """A tensor that a rank keeps for a parameter: shaped like its part of it, or a flattened run of that part."""

    tensor: torch.Tensor
    run: tuple[int, int] | None = None
    shape: Shape | None = None
    """The shape of what it is a run of, for a parameter that has another shape itself."""


@dataclass(frozen=True)
class Share:
    """The rows of a tensor that belong to one microbatch, and where they lie in that microbatch's own tensor."""

    microbatch: int
    rows: torch.Tensor
    placement: Placement


Recall = Callable[[Site, int], "torch.Tensor | None"]
"""A function that returns the reference's tensor at a site and microbatch, in this step."""


class Handle(Protocol):
    """A registration that ends when it is removed."""

    def remove(self) -> None: ...


class Adapter:
    """What TTrace must know of a framework's model and optimizer on this rank."""

    rank: int = 0

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: Optimizer | None = None,  # noqa: ARG002
        *,
        mesh: Mesh | str | None = None,
    ) -> None:
        """Set up the adapter for `chunks`: the model, or this rank's pipeline stages. `mesh` is that of attach, if any.

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
        """Return whether this adapter is for these modules, without importing the framework: its users have done so."""
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
        """The factor by which the framework's reduction over ranks will still multiply gradients, for instance 1/dp."""
        return 1.0

    # What things are called, and what is traced

    def name(self, chunk: nn.Module, path: str) -> str:
        """Return the reference's name of the module, parameter or buffer at this path of a chunk."""
        return find_canonical_name(path, chunk)

    @property
    def divided(self) -> frozenset[str]:
        """The modules of which each stage of a pipeline has a part, under the same name."""
        return frozenset({ROOT})

    @property
    def untraced(self) -> frozenset[Kind]:
        """The kinds of tensors that the reference may record, but this run cannot."""
        return frozenset()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the reader of the report."""
        return ()

    def is_watched(self, name: str, *, isolated: bool) -> bool:  # noqa: ARG002
        """Whether this module's calls are traced, and may be isolated; its parameters always are."""
        return True

    @property
    def is_in_loss(self) -> bool:
        """Whether the framework computes a loss now, so that a backward pass that starts here is only a part of it."""
        return False

    # Layouts

    def read_placement(
        self,
        tensor: torch.Tensor,  # noqa: ARG002
        apart: Collection[str] = (),  # noqa: ARG002
        splits: Mapping[str, Split] = NO_SPLITS,  # noqa: ARG002
        *,
        of_gradient: bool = False,  # noqa: ARG002
    ) -> Placement | None:
        """Read the layout that the tensor itself states, as a DTensor does; None if it states none.

        Along the axes `apart` each rank has microbatches of its own: there the tensor is whole, whatever it states.
        `splits` are the ways in which axes cut sequences, for tensors that do not state it. With `of_gradient`, read
        the layout of the tensor's gradient, where the gradient will not state it itself.
        """
        return None

    def find_rule(self, site: Site, num_dims: int) -> Rule | None:  # noqa: ARG002
        """Find the layout that the framework states for a tensor with `num_dims` dims at a site, if any."""
        return None

    def split_rows(self, site: Site, tensor: torch.Tensor, number: int, recall: Recall) -> Sequence[Share] | None:  # noqa: ARG002
        """Split a tensor that has rows of several microbatches; return None for any other tensor.

        `number` is the number of microbatches that this rank has run before.
        """
        return None

    def find_disagreements(self, parameters: Mapping[str, Placement]) -> Iterable[str]:  # noqa: ARG002
        """Describe each parameter for which the framework itself states another placement."""
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

    def find_optimizer(self, given: Optimizer | None) -> Optimizer | None:
        """Find the optimizer to watch: what attach got, unless the framework has its own."""
        return given

    def on_parameters_replaced(self, optimizer: Optimizer | None) -> None:
        """Refresh every copy that the optimizer keeps of the parameters, which have other values now."""

    def find_torch_optimizers(self, optimizer: Optimizer | None) -> Sequence[torch.optim.Optimizer]:
        """Find the optimizers of torch that do the work of this one and hold its state."""
        # ZeroRedundancyOptimizer keeps an optimizer of its own for this rank's share; importing it warns.
        inner = ((each, getattr(each, "optim", None)) for each in list_optimizers(optimizer))
        return [own if isinstance(own, torch.optim.Optimizer) else each for each, own in inner]

    def find_groups(
        self, optimizer: Optimizer | None, parameters: Iterable[nn.Parameter]
    ) -> Iterable[tuple[nn.Parameter, Mapping[str, object]]]:
        """Find those of the parameters that this rank's optimizer updates, each with its group of settings."""
        groups = {
            id(parameter): group
            for each in self.find_torch_optimizers(optimizer)
            for group in read_groups(each)
            for parameter in group["params"]
        }
        return ((parameter, groups[id(parameter)]) for parameter in parameters if id(parameter) in groups)

    def watch_steps(
        self, optimizer: Optimizer, before: Callable[[Optimizer | None], None], after: Callable[[], None]
    ) -> Sequence[Handle]:
        """Call `before` and `after` around each step of the optimizer, until the handles are removed.

        `before` gets that one of several optimizers that steps, or None if all do. A step that gets a closure computes
        gradients itself: `before` is called each time after the closure.
        """

        def on_step(
            stepping: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first one is the optimizer
            if not callable(closure):
                before(stepping)
                return args, kwargs
            other = _call_after(closure, lambda: before(stepping))
            return ((args[0], other, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": other})

        return [
            handle
            for each in list_optimizers(optimizer)
            for handle in (each.register_step_pre_hook(on_step), each.register_step_post_hook(lambda *_: after()))
        ]

    # Values

    def read_values(self, parameter: nn.Parameter) -> OwnedSlice:
        """Return the memory of this rank's part of a parameter: in the shape that its layout describes, or a run."""
        return OwnedSlice(parameter.detach())

    def read_gradient(self, parameter: nn.Parameter) -> OwnedSlice | None:
        """Return the part of the gradient that this rank has, as the optimizer will use it."""
        return None if parameter.grad is None else OwnedSlice(parameter.grad)

    def read_updated(self, parameter: nn.Parameter) -> OwnedSlice | None:
        """Return the part of an updated parameter that this rank has already."""
        return OwnedSlice(parameter.detach())

    def read_optimizer_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, OwnedSlice]:
        """Return what the optimizer keeps for a parameter on this rank; nothing if another rank keeps it."""
        states = (keeper.state.get(parameter, {}) for keeper in self.find_torch_optimizers(optimizer))
        state: Mapping[str, object] = next(filter(None, states), {})
        return {str(key): OwnedSlice(value) for key, value in state.items() if isinstance(value, torch.Tensor)}

    def to_full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the logical value of a scalar that every rank needs, such as the norm that clipping uses."""
        return tensor

    def to_local(self, tensor: torch.Tensor, site: Site | None = None) -> torch.Tensor:  # noqa: ARG002
        """Return this rank's values as a plain tensor, as they count in the logical tensor at this site."""
        return tensor

    def with_local(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return a tensor that is distributed like the given one, with these values on this rank."""
        return local


def _call_after(closure: Callable[[], Any], function: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure that calls the function each time after the given one."""

    @functools.wraps(closure)
    def call_both() -> Any:
        result = closure()
        function()
        return result

    return call_both


def find_rank_and_world() -> tuple[int, int]:
    """Find this process's rank and the number of ranks; a launched job must have initialised its process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CaptureError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but no process group is initialised. "
            "Call ttrace.attach after torch.distributed.init_process_group."
        )
    return 0, 1


def check_mesh(mesh: Mesh, num_ranks: int) -> None:
    """Refuse a mesh whose number of ranks is not that of the job."""
    if mesh.num_ranks != num_ranks:
        raise CaptureError(
            f"mesh {str(mesh)!r} has {mesh.num_ranks} ranks, but {num_ranks} run. Give attach(mesh=...) "
            "all axes of the job, slowest first; a single process needs none."
        )


def make_anonymous_mesh(num_ranks: int) -> Mesh:
    """Make the mesh of a job if only its number of ranks is known."""
    return Mesh.of(**{ANONYMOUS_AXIS: num_ranks}) if num_ranks > 1 else Mesh()


def list_optimizers(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Any]:
    """List the optimizers that a script passed to attach: none, one, or several."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def read_groups(optimizer: Optimizer) -> Sequence[Mapping[str, Any]]:
    """Read an optimizer's groups of parameters, if they are like torch's; otherwise none."""
    groups = getattr(optimizer, "param_groups", ())
    return [group for group in groups if isinstance(group, Mapping) and isinstance(group.get("params"), Iterable)]
