"""The contract of an adapter: what TTrace must know about a framework.

Derive a class from `Adapter` and override what the framework does differently. Every member has a default that is right
for plain PyTorch modules and optimizers. Most adapters override `recognizes`, `name`, `find_rule` and `attach`, and set
`mesh` in `__init__`. `attach` reports what only the framework knows through `FrameworkEvents`.

A session uses an adapter in this order: it is constructed, `find_optimizer` chooses the optimizer, `attach` patches the
framework. The other members are called while the script trains. `detach` removes all patches at the end.

Terms: a chunk is a module that was passed to `ttrace.attach`, the model or one pipeline stage of it. A path is the name
of a module or parameter within its chunk; the reference's name is the name of the same thing in the unparallelised
model. A logical tensor is the tensor that a single process would have, and a placement is the part of it that this rank
has.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

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
"""The name of the only axis of a mesh if nothing but the number of ranks is known."""

Optimizer = Any
"""An optimizer of torch or of the framework."""


@dataclass(frozen=True)
class OwnedSlice:
    """A tensor that this rank keeps for a parameter.

    Without `run` it has the shape of this rank's part of the parameter. With `run` it is one-dimensional and holds the
    elements from `run[0]` to `run[1]` of that part, flattened.
    """

    tensor: torch.Tensor
    run: tuple[int, int] | None = None
    shape: Shape | None = None
    """The shape of the part that `run` refers to, if the parameter itself does not have it (as under ZeRO-3)."""


@dataclass(frozen=True)
class Share:
    """The rows of a tensor that belong to one microbatch, and their placement in its logical tensor."""

    microbatch: int
    """The number of the microbatch in the reference, which counts those of all data-parallel ranks."""
    rows: torch.Tensor
    """The indices of the rows along dim 0."""
    placement: Placement


Recall = Callable[[Site, int], "torch.Tensor | None"]
"""A function that returns the reference's tensor for a site and a microbatch in this step; None if it has none."""


class Handle(Protocol):
    """A registration, such as a hook, that `remove` ends."""

    def remove(self) -> None: ...


class Adapter:
    """What TTrace must know about a framework's model and optimizer on this rank."""

    rank: int = 0

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: Optimizer | None = None,  # noqa: ARG002
        *,
        mesh: Mesh | str | None = None,
    ) -> None:
        """Set up the adapter for `chunks`: the model, or this rank's pipeline stages.

        `optimizer` and `mesh` are the arguments of `ttrace.attach`. A subclass that overrides this must set `rank`,
        `chunks`, `mesh` and `coord`.
        """
        self.rank, num_ranks = find_rank_and_world()
        self.chunks = chunks
        self.mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh or make_anonymous_mesh(num_ranks)
        check_mesh(self.mesh, num_ranks)
        self.coord = self.mesh.coord(self.rank)

    # Recognition

    @classmethod
    def recognizes(cls, chunks: Sequence[nn.Module]) -> bool:  # noqa: ARG003
        """Return whether this adapter is for these modules.

        It must not import the framework: if the model belongs to it, the script has imported it already.
        """
        return False

    # The mesh

    chunks: Sequence[nn.Module]
    """The model, or this rank's pipeline stages."""
    mesh: Mesh
    """The mesh of all ranks of the job, read from the framework's own process groups."""
    coord: Coord
    """This rank's coordinates in the mesh."""

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which each rank runs different microbatches."""
        return ("dp",) if "dp" in self.mesh.sizes else ()

    @property
    def distributing_axes(self) -> frozenset[str]:
        """The axes along which ranks have different microbatches or modules: by themselves they cut no tensor."""
        return frozenset((*self.data_axes, "pp")) & set(self.mesh.sizes)

    @property
    def reduced_axes(self) -> frozenset[str]:
        """The axes over which the framework reduces gradients, so that all ranks along them get the same bits."""
        return frozenset()

    @property
    def grad_factor(self) -> float:
        """The factor that the framework's reduction applies to gradients after backward, such as 1/dp for a mean."""
        return 1.0

    # Names, and what is traced

    def name(self, chunk: nn.Module, path: str) -> str:
        """Return the reference's name of the module, parameter or buffer at this path of a chunk.

        Override it if a rank counts layers or experts from zero, while the whole model continues to count.
        """
        return find_canonical_name(path, chunk)

    @property
    def divided(self) -> frozenset[str]:
        """The names of modules that are divided over pipeline stages, so that each stage has a part of them."""
        return frozenset({ROOT})

    @property
    def untraced(self) -> frozenset[Kind]:
        """The kinds of tensors that the reference may record, but that cannot be recorded in this run."""
        return frozenset()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the report, for example on what is not traced."""
        return ()

    def is_watched(self, name: str, *, isolated: bool) -> bool:  # noqa: ARG002
        """Return whether the calls of this module are traced; its parameters always are.

        With `isolated`, return whether the module may run alone on generated inputs.
        """
        return True

    @property
    def is_in_loss(self) -> bool:
        """Whether the framework is computing a loss in parts, so that a backward pass that starts now is one part."""
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
        """Read the placement that the tensor itself states, as a DTensor does; None if it states none.

        Along the axes `apart` each rank has different microbatches, so there the tensor counts as whole even if it
        states otherwise. `splits` gives the order in which axes cut sequences, for tensors that do not state it. With
        `of_gradient`, read the placement of the tensor's gradient; None if the gradient will state it itself.
        """
        return None

    def find_rule(self, site: Site, num_dims: int) -> Rule | None:  # noqa: ARG002
        """Find the rule for a tensor with `num_dims` dims at a site; None if the framework does not decide its layout.

        Derive layouts from the classes of modules, not from attributes that the framework sets: a missing attribute may
        be the bug. Layouts that nothing states are inferred from shapes.
        """
        return None

    def split_rows(self, site: Site, tensor: torch.Tensor, number: int, recall: Recall) -> Sequence[Share] | None:  # noqa: ARG002
        """Split a tensor whose rows belong to several microbatches, as an expert's input; None for any other tensor.

        `number` is the number of microbatches that this rank has run before. `recall` reads the reference,
        for example its routing.
        """
        return None

    def find_disagreements(self, parameters: Mapping[str, Placement]) -> Iterable[str]:  # noqa: ARG002
        """Describe each parameter whose placement differs from the one that the framework states in its checkpoints."""
        return ()

    # Patches and events

    def attach(self, events: FrameworkEvents) -> None:
        """Start to report to `events` what only the framework knows, such as a pipeline's microbatches and its loss.

        Patch the framework only through `self.patches`, so that `detach` removes every patch.
        """

    def detach(self) -> None:
        """Remove all patches of this adapter, in reverse order."""
        self.patches.remove()

    @cached_property
    def patches(self) -> Patches:
        """This adapter's patches of the framework."""
        return Patches()

    # The optimizer

    def find_optimizer(self, given: Optimizer | None) -> Optimizer | None:
        """Find the optimizer to watch: the one passed to attach (`given`), unless the framework has its own."""
        return given

    def on_parameters_replaced(self, optimizer: Optimizer | None) -> None:
        """Update all copies of parameters that the optimizer keeps: TTrace has just replaced the parameters' values."""

    def find_torch_optimizers(self, optimizer: Optimizer | None) -> Sequence[torch.optim.Optimizer]:
        """Find the optimizers of torch inside of this one, which hold its groups and its state."""
        # ZeroRedundancyOptimizer has an inner optimizer for this rank's share. Not isinstance: importing it warns.
        inner = ((each, getattr(each, "optim", None)) for each in list_optimizers(optimizer))
        return [own if isinstance(own, torch.optim.Optimizer) else each for each, own in inner]

    def find_groups(
        self, optimizer: Optimizer | None, parameters: Iterable[nn.Parameter]
    ) -> Iterable[tuple[nn.Parameter, Mapping[str, object]]]:
        """Find which of the parameters this rank's optimizer updates, each with its parameter group (the settings)."""
        updated = _group_parameters(self.find_torch_optimizers(optimizer))
        # A schedule changes the outer optimizer; ZeroRedundancyOptimizer passes that on when it steps.
        groups = updated | _group_parameters(list_optimizers(optimizer))
        return ((parameter, groups[id(parameter)]) for parameter in parameters if id(parameter) in updated)

    def watch_steps(
        self, optimizer: Optimizer, before: Callable[[Optimizer | None], None], after: Callable[[], None]
    ) -> Sequence[Handle]:
        """Call `before` and `after` around each step of the optimizer, until the handles are removed.

        `before` is called when gradients are final. Its argument is the optimizer that steps, if there are several, or
        None for all. A step with a closure computes gradients in the closure, so `before` is called after each call of
        the closure.
        """

        def on_step(
            stepping: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
            if not callable(closure):
                before(stepping)
                return args, kwargs
            wrapped = _call_after(closure, lambda: before(stepping))
            return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

        return [
            handle
            for each in list_optimizers(optimizer)
            for handle in (each.register_step_pre_hook(on_step), each.register_step_post_hook(lambda *_: after()))
        ]

    # Values

    def read_values(self, parameter: nn.Parameter) -> OwnedSlice:
        """Return the memory of this rank's part of a parameter: not a copy. TTrace writes generated values into it."""
        return OwnedSlice(parameter.detach())

    def read_gradient(self, parameter: nn.Parameter) -> OwnedSlice | None:
        """Return this rank's part of the gradient as the optimizer will use it; None if it has none."""
        return None if parameter.grad is None else OwnedSlice(parameter.grad)

    def read_updated(self, parameter: nn.Parameter) -> OwnedSlice | None:
        """Return the part of a parameter that is already updated on this rank after a step; None if there is none."""
        return OwnedSlice(parameter.detach())

    def read_optimizer_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, OwnedSlice]:
        """Return the optimizer's state for a parameter by name, such as `exp_avg`; empty if another rank keeps it."""
        states = (keeper.state.get(parameter, {}) for keeper in self.find_torch_optimizers(optimizer))
        state: Mapping[str, object] = next(filter(None, states), {})
        return {str(key): OwnedSlice(value) for key, value in state.items() if isinstance(value, torch.Tensor)}

    def to_full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full value of a distributed scalar, such as the gradient norm. All ranks call this together."""
        return tensor

    def to_local(self, tensor: torch.Tensor, site: Site | None = None) -> torch.Tensor:  # noqa: ARG002
        """Return this rank's values as a plain tensor; zeros replace values that do not count in a pending sum."""
        return tensor

    def with_local(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return a tensor that is distributed like `tensor`, with the values `local` on this rank."""
        return local


class FrameworkEvents:
    """The events that an adapter reports while the framework trains, by calling these methods."""

    def on_pipeline(self) -> None:
        """A pipeline is about to run. Calls before this are ignored: a stage may run once to find shapes."""

    def on_chunk(self, microbatch: int, *, is_first: bool, is_last: bool) -> AbstractContextManager[None]:
        """A stage is about to run forward or backward of one microbatch. Run it within the returned context.

        `is_first` and `is_last` are true for the first and the last stage of the pipeline.
        """
        del microbatch, is_first, is_last
        return nullcontext()

    def on_loss(self, loss: torch.Tensor) -> None:
        """A backward pass is about to start from this loss of one microbatch."""

    def on_auxiliary_loss(self, loss: torch.Tensor) -> None:
        """The running module will add the gradient of this loss to its own, as routers do for load balancing."""

    def on_divide(self, divisor: int) -> None:
        """Gradients will be divided by this number after the last microbatch."""

    def on_main_gradients(self, gradients: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Gradients are summed over this rank's microbatches, and not yet reduced over ranks."""

    def on_grad_norm(self, norm: torch.Tensor) -> None:
        """The norm of all gradients was computed, before clipping."""

    def on_clip(self, factor: torch.Tensor) -> None:
        """Gradients are about to be clipped: all are multiplied by this factor."""


def find_rank_and_world() -> tuple[int, int]:
    """Find this process's rank and the number of ranks; raise if a launched job has not initialised a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CaptureError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but no process group is initialised. "
            "Call ttrace.attach after torch.distributed.init_process_group."
        )
    return 0, 1


def check_mesh(mesh: Mesh, num_ranks: int) -> None:
    """Raise an error unless the mesh has as many ranks as the job."""
    if mesh.num_ranks != num_ranks:
        raise CaptureError(
            f"mesh {str(mesh)!r} has {mesh.num_ranks} ranks, but {num_ranks} run. Give attach(mesh=...) "
            "all axes of the job, slowest first; a single process needs none."
        )


def make_anonymous_mesh(num_ranks: int) -> Mesh:
    """Make a mesh from the number of ranks only."""
    return Mesh.of(**{ANONYMOUS_AXIS: num_ranks}) if num_ranks > 1 else Mesh()


def list_optimizers(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Any]:
    """List the optimizers that a script passed to attach."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def read_groups(optimizer: Optimizer) -> Sequence[Mapping[str, Any]]:
    """Read an optimizer's parameter groups; empty if they do not have the form of torch's."""
    groups = getattr(optimizer, "param_groups", ())
    return [group for group in groups if isinstance(group, Mapping) and isinstance(group.get("params"), Iterable)]


def _group_parameters(optimizers: Iterable[Optimizer]) -> dict[int, Mapping[str, Any]]:
    """Map the id of each parameter to its group."""
    return {id(each): group for one in optimizers for group in read_groups(one) for each in group["params"]}


def _call_after(closure: Callable[[], Any], function: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure that calls the function each time after the given one."""

    @functools.wraps(closure)
    def call_both() -> Any:
        result = closure()
        function()
        return result

    return call_both
