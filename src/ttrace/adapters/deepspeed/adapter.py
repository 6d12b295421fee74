"""Adapter for DeepSpeed's engine: ZeRO 0 to 3.

Without ZeRO, the engine reduces gradients itself. ZeRO-1 and ZeRO-2 keep a flat copy of all parameters, of which each
rank has a part with its gradients and optimizer state. ZeRO-3 also partitions the parameters themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ttrace.adapters.adapter import FrameworkEvents, Handle, Optimizer, OwnedSlice, find_rank_and_world
from ttrace.adapters.deepspeed import compat
from ttrace.adapters.deepspeed.compat import CLIP, STEP, UNSCALE
from ttrace.adapters.native.adapter import DATA_AXIS, MeshLike, Native
from ttrace.errors import CaptureError
from ttrace.layouts.mesh import Mesh
from ttrace.patches import Patches

TENSOR_AXIS = "tp"


class DeepSpeed(Native):
    """Adapter for an engine. Ranks along dp have different microbatches."""

    def __init__(
        self, chunks: Sequence[nn.Module], optimizer: Optimizer | None = None, *, mesh: MeshLike | None = None
    ) -> None:
        [self.engine] = [chunk for chunk in chunks if compat.is_engine(chunk)]
        if len(chunks) > 1:
            raise CaptureError("attach got a DeepSpeed engine and other modules. Pass only the engine.")
        if compat.divides_behind_the_loss(self.engine):
            raise CaptureError(
                "this DeepSpeed divides by gradient_accumulation_steps in hooks, where TTrace cannot follow it. "
                "Use DeepSpeed 0.19.6 or later, or trace with gradient_accumulation_steps of 1."
            )
        super().__init__(chunks, optimizer, mesh=mesh if mesh is not None else _make_mesh(self.engine))
        self._events: FrameworkEvents | None = None

    @classmethod
    def recognizes(cls, chunks: Sequence[nn.Module]) -> bool:
        return any(map(compat.is_engine, chunks))

    @property
    def _zero(self) -> Any:
        """The engine's optimizer: one of ZeRO, or of torch."""
        return self.engine.optimizer

    @property
    def reduced_axes(self) -> frozenset[str]:
        return frozenset(self.data_axes)

    @property
    def grad_factor(self) -> float:
        return 1.0 / self.mesh.sizes.get(DATA_AXIS, 1)

    def attach(self, events: FrameworkEvents) -> None:
        self._events = events

    # The optimizer

    def find_optimizer(self, given: Optimizer | None) -> Optimizer | None:  # noqa: ARG002
        return self._zero

    def on_parameters_replaced(self, optimizer: Optimizer | None) -> None:  # noqa: ARG002
        for parameter in self.engine.parameters():
            if compat.is_partitioned(parameter):
                compat.release(parameter)
        if hasattr(self._zero, "refresh_fp32_params"):
            self._zero.refresh_fp32_params()

    def find_torch_optimizers(self, optimizer: Optimizer | None) -> Sequence[torch.optim.Optimizer]:  # noqa: ARG002
        inner = self._zero
        while not isinstance(inner, torch.optim.Optimizer) and hasattr(inner, "optimizer"):
            inner = inner.optimizer
        return [inner]

    def find_groups(
        self, optimizer: Optimizer | None, parameters: Iterable[nn.Parameter]
    ) -> Iterable[tuple[nn.Parameter, Mapping[str, object]]]:
        if isinstance(self._zero, torch.optim.Optimizer):
            return super().find_groups(optimizer, parameters)
        watched = {id(parameter) for parameter in parameters}
        return (pair for pair in compat.list_groups(self._zero) if id(pair[0]) in watched)

    def watch_steps(
        self,
        optimizer: Optimizer,  # noqa: ARG002
        before: Callable[[Optimizer | None], None],
        after: Callable[[], None],
    ) -> Sequence[Handle]:
        assert self._events is not None, "attach comes first"
        module = sys.modules[compat.ENGINE.rpartition(".")[0]]
        return [watch_engine(self.engine, before, after), watch_clip(self._zero, module, self._events)]

    # Values

    def read_values(self, parameter: nn.Parameter) -> OwnedSlice:
        if not compat.is_partitioned(parameter):
            return super().read_values(parameter)
        return OwnedSlice(*compat.read_partition(parameter), compat.read_shape(parameter))

    def read_gradient(self, parameter: nn.Parameter) -> OwnedSlice | None:
        if compat.is_partitioned(parameter):
            _, run = compat.read_partition(parameter)
            gradient = self._zero.get_local_fp32_grad_for_param(parameter) if parameter.requires_grad else None
            return None if gradient is None or run[0] == run[1] else OwnedSlice(gradient[: run[1] - run[0]], run)
        if not compat.has_fragment(parameter):
            return super().read_gradient(parameter)
        gradient = compat.read_fragment_gradient(parameter) if compat.read_fragment(parameter) is not None else None
        return None if gradient is None else OwnedSlice(gradient, _find_run(parameter))

    def read_updated(self, parameter: nn.Parameter) -> OwnedSlice | None:
        values = self.read_values(parameter)
        return None if values.run is not None and values.run[0] == values.run[1] else values

    def read_optimizer_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, OwnedSlice]:
        if isinstance(self._zero, torch.optim.Optimizer):
            return super().read_optimizer_state(optimizer, parameter)
        copy = compat.find_copy(self._zero, parameter)
        if copy is not None:
            state = self._zero.optimizer.state.get(copy, {})
            return {str(key): OwnedSlice(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
        run = _find_run(parameter)
        if run is None or not parameter.requires_grad or run[0] == run[1]:
            return {}
        state, begin, size = compat.read_flat_state(self._zero, parameter)
        tensors = {str(key): value for key, value in state.items() if isinstance(value, torch.Tensor)}
        return {
            key: OwnedSlice(value) if value.ndim == 0 else OwnedSlice(_cut(value, begin, size, run), run)
            for key, value in tensors.items()
        }


def watch_engine(engine: Any, before: Callable[[Optimizer | None], None], after: Callable[[], None]) -> Patches:
    """Call `before` and `after` around each step that ends an accumulation, until the patches are removed."""

    def wrap(own_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            before(None)
            result = own_step(*args, **kwargs)
            after()
            return result

        return step

    patches = Patches()
    patches.wrap(engine, STEP, wrap)
    return patches


def watch_clip(zero: Any, engine_module: Any, events: FrameworkEvents) -> Patches:
    """Report the norm and the factor by which gradients are clipped, until the patches are removed."""

    def report(norm: torch.Tensor, max_norm: float) -> None:
        events.on_grad_norm(norm)
        events.on_clip(torch.clamp(max_norm / (norm + 1e-6), max=1.0))

    def wrap_clip(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
            norm = own(parameters, max_norm, *args, **kwargs)
            report(norm.detach().float().reshape(()), max_norm)
            return norm

        return clip

    def wrap_unscale(own: Callable[..., Any]) -> Callable[..., Any]:
        def unscale(*args: Any, **kwargs: Any) -> Any:
            if zero.clip_grad > 0:
                # The other arguments are lists, or the number of a group.
                norm = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor | float))
                if not isinstance(norm, torch.Tensor):
                    norm = torch.tensor(norm, dtype=torch.float32, device="cpu")
                report(norm.detach().float().reshape(()) / zero.loss_scale, zero.clip_grad)
            return own(*args, **kwargs)

        return unscale

    patches = Patches()
    if hasattr(zero, UNSCALE):
        patches.wrap(zero, UNSCALE, wrap_unscale)
    else:
        patches.wrap(engine_module, CLIP, wrap_clip)
    return patches


def _cut(state: torch.Tensor, begin: int, size: int, run: tuple[int, int]) -> torch.Tensor:
    """Select a parameter's run from a flat state, without padding."""
    return state.detach().flatten()[begin : begin + min(size, run[1] - run[0])]


def _find_run(parameter: nn.Parameter) -> tuple[int, int] | None:
    """Find the run of a parameter that this rank's optimizer updates; None if another rank updates it."""
    if compat.is_partitioned(parameter):
        return compat.read_partition(parameter)[1]
    mapping = compat.read_fragment(parameter)
    if mapping is None:
        return None
    address = mapping.lp_fragment_address
    return address.start, address.start + address.numel


def _make_mesh(engine: Any) -> Mesh:
    """Make the mesh of an engine: its data-parallel ranks, and its tensor-parallel ones, which are adjacent."""
    _, num_ranks = find_rank_and_world()
    size = engine.dp_world_size
    axes = {DATA_AXIS: size, TENSOR_AXIS: num_ranks // size}
    return Mesh.of(**{axis: number for axis, number in axes.items() if number > 1})
