"""State that a model keeps from step to step: parameters, buffers, gradients, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace

import torch
from torch import nn

from ttrace.adapters.adapter import Adapter, Optimizer, OwnedSlice, read_groups
from ttrace.capture.observe.step_counter import StepCounter
from ttrace.capture.plan import Plan
from ttrace.capture.probes.dispatch import Dispatcher
from ttrace.capture.probes.generator import GeneratedTensor
from ttrace.capture.probes.isolation import Isolate
from ttrace.capture.state.buffers import Buffers
from ttrace.capture.state.gradients import StreamedGradients
from ttrace.capture.state.load_watch import LoadWatch
from ttrace.capture.state.microbatch_gradients import MicrobatchGradients
from ttrace.capture.state.optimizer_settings import OptimizerSettings, read_settings
from ttrace.large_references.parameter_source import find_source
from ttrace.layouts.ids import Kind, Site, TensorId, encode_name
from ttrace.layouts.placement import Placement
from ttrace.layouts.region import Region
from ttrace.values.generate import Distribution, Normal

ZERO = Normal(0.0, 0.0)
"""The distribution of the gradient of rows that no token reached."""


@dataclass(frozen=True)
class HeldTensors:
    """The parameters and buffers of this rank, by name; each parameter with its placement and distribution."""

    parameters: Mapping[str, nn.Parameter]
    buffers: Buffers
    generated: Mapping[str, GeneratedTensor]


class ModelState:
    """Observer of the model's state: parameters and buffers before a step, final gradients, and the state after it."""

    def __init__(
        self,
        plan: Plan,
        adapter: Adapter,
        optimizer: Optimizer | None,
        tensors: HeldTensors,
        dispatcher: Dispatcher,
        clock: StepCounter,
        isolate: Isolate | None,
        keep: Callable[[str], None],
    ) -> None:
        self._adapter = adapter
        self._optimizer = optimizer
        self._tensors = tensors
        self._dispatcher = dispatcher
        self._clock = clock
        self._isolate = isolate
        self.notes: list[str] = []
        """What could not be observed."""
        self.settings = OptimizerSettings()
        """The optimizer's settings when it stepped, as far as they decide updates."""
        self.unloaded: tuple[str, ...] = ()
        """The parameters and buffers that a checkpoint did not change."""
        self._loads = LoadWatch(self._read_all) if plan.first_step else None
        self._has_stepped = False
        self._shown: set[str] = set()
        """The parameters whose final gradients this step has shown."""
        watched = tensors.parameters if plan.microbatch_grads else {}
        self._microbatch_gradients = MicrobatchGradients(watched, self._read_microbatch, self._on_microbatch_gradient)
        self._streamed_gradients = StreamedGradients(tensors.parameters, self._on_streamed_gradient, keep)

    def remove(self) -> None:
        """Remove all hooks."""
        self._microbatch_gradients.remove()
        self._streamed_gradients.remove()

    def on_start(self) -> None:
        """Show parameters and buffers before a step."""
        self._has_stepped = False
        self._shown.clear()
        self._streamed_gradients.begin()
        if self._loads is not None:
            self.unloaded = self._loads.find_unloaded()
            self._loads = None
            for name in self._tensors.parameters:  # the state that the step before has left
                self._show_optimizer_state(name, self._clock.step - 1)
        for name, parameter in self._tensors.parameters.items():
            generated = self._tensors.generated[name]
            tensor_id = self._make_id(name, Kind.PARAM)
            owned = self._adapter.read_values(parameter)
            is_generated = find_source(parameter) is not None
            self._dispatcher.visit(
                tensor_id,
                owned.tensor,
                values=generated.distribution,
                stated=generated.placement if owned.run is not None else None,
                fallback=generated.placement,
                is_generated=is_generated,
            )
        self._tensors.buffers.on_start()
        self._show_buffers(Kind.BUFFER)

    def on_main_gradients(self, gradients: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Show the gradients summed over all microbatches of this rank, before those of other ranks are added."""
        if not self._clock.is_running:
            return
        names = {parameter: name for name, parameter in self._tensors.parameters.items()}
        for parameter, gradient in gradients:
            self._show_slice(self._make_id(names[parameter], Kind.MAIN_GRAD), OwnedSlice(gradient))

    def on_final_gradients(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Show gradients once a step, as soon as they are final: when the optimizer steps, they may be clipped.

        `tensors` are the gradients or parameters of which it is known. They count only if there are several optimizers,
        which step at different times.
        """
        given = {id(each) for each in tensors} if len(self._list_optimizers()) > 1 else set()
        parameters = self._tensors.parameters.values()
        final = {id(each) for each in parameters if id(each) in given or id(each.grad) in given}
        self._show_gradients(final or {id(each) for each in parameters})

    def on_step_begin(self, optimizer: Optimizer | None = None) -> None:
        """Show the gradients that are final when this optimizer steps: all but those of other optimizers."""
        self._clock.is_in_update = True
        updated = {id(each): _list_parameters(each) for each in self._list_optimizers()}
        now = updated.pop(id(optimizer), set())
        later = set().union(*updated.values()) - now if now else set()
        self._show_gradients({id(each) for each in self._tensors.parameters.values()} - later)

    def _list_optimizers(self) -> list[Optimizer]:
        return list(self._adapter.find_torch_optimizers(self._optimizer))

    def _show_gradients(self, final: Set[int]) -> None:
        """Show the gradients of the parameters with these ids, unless this step has shown them."""
        if not self._clock.is_running:
            return
        self._microbatch_gradients.flush()
        if not self._shown:
            self._streamed_gradients.flush()
            self.notes = self._microbatch_gradients.notes()
        for name, parameter in self._tensors.parameters.items():
            if id(parameter) not in final or name in self._shown:
                continue
            self._shown.add(name)
            owned = self._adapter.read_gradient(parameter)
            if owned is not None:
                self._show_gradient(self._make_id(name, Kind.PARAM_GRAD), owned)

    def on_optimizer_step(self) -> None:
        """Read the settings of an optimizer that has stepped; its results are read later, when all ranks have them."""
        if self._clock.is_running:
            self._has_stepped = True
            names = {parameter: name for name, parameter in self._tensors.parameters.items()}
            grouped = self._adapter.find_groups(self._optimizer, names)
            self.settings = read_settings((names[parameter], group) for parameter, group in grouped)

    def on_end(self) -> None:
        """Show the state after the step."""
        self._show_buffers(Kind.BUFFER_AFTER)  # even if no optimizer has stepped: forward passes change them
        if not self._has_stepped:
            return
        for name, parameter in self._tensors.parameters.items():
            if find_source(parameter) is not None:
                continue
            updated = self._adapter.read_updated(parameter)
            if updated is not None:
                self._show_slice(self._make_id(name, Kind.PARAM_AFTER), updated)
            self._show_optimizer_state(name, self._clock.step)

    def _show_optimizer_state(self, name: str, step: int) -> None:
        parameter = self._tensors.parameters[name]
        for key, owned in self._adapter.read_optimizer_state(self._optimizer, parameter).items():
            tensor_id = TensorId.of(step, None, name, Kind.OPTIM, slot=encode_name(key))
            if owned.run is not None or owned.tensor.shape == self._adapter.read_values(parameter).tensor.shape:
                self._show_slice(tensor_id, owned)
            else:  # a step counter for instance is not cut like the parameter
                whole = Placement(Region.whole(tuple(owned.tensor.shape)))
                self._dispatcher.visit(tensor_id, owned.tensor, stated=whole)

    def _read_all(self) -> dict[str, torch.Tensor]:
        """Read this rank's parameters and buffers."""
        values = {name: self._adapter.read_values(each).tensor for name, each in self._tensors.parameters.items()}
        return {
            name: self._adapter.to_local(each) for name, each in (values | dict(self._tensors.buffers.read())).items()
        }

    def _show_buffers(self, kind: Kind) -> None:
        for name, buffer in self._tensors.buffers.read().items():
            self._dispatcher.visit(self._make_id(name, kind), buffer)

    def _show_gradient(self, tensor_id: TensorId, owned: OwnedSlice) -> None:
        whole_id = self._dispatcher.find_id(tensor_id, owned.tensor)
        source = self._isolate.distribution(whole_id) if self._isolate else None
        self._show_slice(tensor_id, owned, source)
        if self._isolate is not None and source is not None:
            like = self._tensors.generated[tensor_id.name].placement
            placement = self._place_run(tensor_id, owned) or self._dispatcher.resolve(
                tensor_id, owned.tensor, fallback=like
            )
            if placement is not None:
                tensor, placement = self._dispatcher.port(tensor_id, owned.tensor, placement)
                self._isolate.replace_gradient(whole_id, tensor, placement, source)

    def _read_microbatch(self) -> int | None:
        return self._clock.microbatch if self._clock.is_watched else None

    def _on_microbatch_gradient(self, name: str, microbatch: int, gradient: torch.Tensor) -> None:
        tensor_id = self._dispatcher.id_of(Site(name, Kind.PARAM_GRAD), microbatch)
        placement = self._tensors.generated[name].placement
        if placement.region.flat is not None:  # it is whole while its module runs
            placement = replace(placement, region=replace(placement.region, flat=None))
        self._dispatcher.visit(tensor_id, gradient, microbatch, fallback=placement)

    def _on_streamed_gradient(self, name: str, gradient: torch.Tensor | None, region: Region | None) -> None:
        """Show a streamed parameter's complete gradient, whole or of a region; None stands for zeros."""
        if not self._clock.is_running:
            return
        tensor_id, placement = self._make_id(name, Kind.PARAM_GRAD), self._tensors.generated[name].placement
        if region is not None:
            placement = replace(placement, region=region)
        if gradient is not None:
            self._dispatcher.visit(tensor_id, gradient, stated=placement)
        else:
            dtype = self._tensors.parameters[name].dtype
            zeros = torch.zeros((), dtype=dtype, device="cpu").expand(placement.region.local_shape)
            self._dispatcher.visit(tensor_id, zeros, stated=placement, values=ZERO, is_generated=True)

    def _show_slice(self, tensor_id: TensorId, owned: OwnedSlice, values: Distribution | None = None) -> None:
        """Show a tensor that is shaped like a parameter, or like a run of it."""
        stated, like = self._place_run(tensor_id, owned), self._tensors.generated[tensor_id.name].placement
        self._dispatcher.visit(tensor_id, owned.tensor, values=values, stated=stated, fallback=like)

    def _place_run(self, tensor_id: TensorId, owned: OwnedSlice) -> Placement | None:
        """Find where a run of a parameter's part lies; None if the slice is no run."""
        if owned.run is None:
            return None
        like = self._tensors.generated[tensor_id.name].placement
        return replace(like, region=replace(like.region, flat=(owned.run,)))

    def _make_id(self, name: str, kind: Kind, slot: str = "") -> TensorId:
        return TensorId.of(self._clock.step, None, name, kind, slot=slot)


def _list_parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in read_groups(optimizer) for parameter in group["params"]}
