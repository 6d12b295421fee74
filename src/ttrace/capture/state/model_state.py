"""State that a model keeps from step to step: parameters, buffers, gradients, and the optimizer's state.

`ModelState` shows it to the probes. `Buffers` finds the buffers that forward passes change, `read_settings` reads the
optimizer's settings, and `LoadWatch` finds what a checkpoint did not load.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ttrace.adapters.adapter import Adapter, Optimizer, OwnedSlice, read_groups
from ttrace.capture.observe.events import StepCounter
from ttrace.capture.plan import Plan
from ttrace.capture.probes.dispatch import Dispatcher
from ttrace.capture.probes.generator import GeneratedTensor, read_numbers
from ttrace.capture.probes.isolation import Isolate
from ttrace.capture.probes.probe import Visit
from ttrace.capture.resolve.names import find_evaluated, format_setting
from ttrace.capture.state.gradients import MicrobatchGradients, StreamedGradients
from ttrace.large_references.parameter_source import find_source
from ttrace.layouts.ids import Kind, Site, TensorId, encode_name
from ttrace.layouts.placement import Placement
from ttrace.layouts.region import Region
from ttrace.trace.format import INITIAL_RATE, NEXT_RATE
from ttrace.trace.tensor_bytes import view_memory
from ttrace.values.generate import Distribution, Normal

ZERO = Normal(0.0, 0.0)
"""The distribution of the gradient of rows that no token reached."""


class Buffers:
    """The buffers of a model. The reference finds out which of them the first forward pass of a step changes.

    Statistics like those of a batch norm depend on which microbatches a rank has run; buffers that an optimizer's step
    changes, like the bias that balances experts, do not. A forward pass may replace a buffer by a different tensor, so
    buffers are looked up again each time.
    """

    def __init__(self, read: Callable[[], Mapping[str, torch.Tensor]], *, is_reference: bool) -> None:
        self.read = read
        read()  # refuse names that collide now, and not in the middle of a step
        self._is_reference = is_reference
        self._before: Mapping[str, torch.Tensor] = {}
        self._changed: dict[str, None] = {}
        self._is_same: list[tuple[str, torch.Tensor]] = []
        """Comparisons whose results have not been read from the device yet."""

    @property
    def changed(self) -> tuple[str, ...]:
        """The buffers that forward passes change."""
        results = read_numbers(result for _, result in self._is_same)
        self._changed |= {name: None for (name, _), is_same in zip(self._is_same, results, strict=True) if not is_same}
        self._is_same.clear()
        return tuple(self._changed)

    def on_start(self) -> None:
        """Begin a step."""
        if self._is_reference:
            self._before = {name: buffer.detach().clone() for name, buffer in self.read().items()}

    def on_backward(self) -> None:
        """Compare the buffers after the first forward pass of the step."""
        now = self.read() if self._before else {}
        for name, before in self._before.items():
            after = now.get(name)
            if after is not None and after.shape == before.shape and after.dtype == before.dtype:
                self._is_same.append((name, (before == after).all()))
            else:
                self._changed[name] = None
        self._before = {}


@dataclass(frozen=True)
class HeldTensors:
    """The parameters and buffers of this rank, by name; each parameter with its placement and distribution."""

    parameters: Mapping[str, nn.Parameter]
    buffers: Buffers
    generated: Mapping[str, GeneratedTensor]
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    """The modules, by name."""


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
        add_problem: Callable[[str], None],
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
        """The optimizer's settings in the last step, as far as they decide updates."""
        self.evaluated: tuple[str, ...] = ()
        """The modules of torch that training mode changes, and that were not in it in the last step."""
        self.unloaded: tuple[str, ...] = ()
        """The parameters and buffers that a checkpoint did not change."""
        self._loads = LoadWatch(self._read_all) if plan.first_step else None
        self._has_stepped = self._has_settings = False
        self._shown: set[str] = set()
        """The parameters whose final gradients this step has shown."""
        watched = tensors.parameters if plan.microbatch_grads else {}
        self._microbatch_gradients = MicrobatchGradients(watched, self._read_microbatch, self._on_microbatch_gradient)
        self._streamed_gradients = StreamedGradients(tensors.parameters, self._on_streamed_gradient, add_problem)

    def remove(self) -> None:
        """Remove all hooks."""
        self._microbatch_gradients.remove()
        self._streamed_gradients.remove()

    def on_start(self) -> None:
        """Show parameters and buffers before a step."""
        self._has_stepped = self._has_settings = False
        self._shown.clear()
        self._streamed_gradients.begin()
        if self._loads is not None:
            self.unloaded = self._loads.find_unloaded()
            self._loads = None
            for name in self._tensors.parameters:  # the state after the step before
                self._show_optimizer_state(name, self._clock.step - 1)
        for name, parameter in self._tensors.parameters.items():
            generated = self._tensors.generated[name]
            owned = self._adapter.read_values(parameter)
            visit = Visit(
                self._make_id(name, Kind.PARAM),
                owned.tensor,
                generated.placement if owned.run is not None else None,
                values=generated.distribution,
                is_generated=find_source(parameter) is not None,
                fallback=generated.placement,
            )
            self._dispatcher.visit(visit)
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

        `tensors` are gradients that are final, or their parameters. They matter only if there are several optimizers,
        which step at different times.
        """
        given = {id(each) for each in tensors} if len(self._list_optimizers()) > 1 else set()
        parameters = self._tensors.parameters.values()
        final = {id(each) for each in parameters if id(each) in given or id(each.grad) in given}
        self._show_gradients(final or {id(each) for each in parameters})

    def on_step_begin(self, optimizer: Optimizer | None = None) -> None:
        """Show the gradients that are final when this optimizer steps: all but those of other optimizers."""
        self._clock.is_in_update = True
        if self._clock.is_running:
            self._read_facts()
        updated = {id(each): _list_parameters(each) for each in self._list_optimizers()}
        now = updated.pop(id(optimizer), set())
        later = set().union(*updated.values()) - now if now else set()
        self._show_gradients({id(each) for each in self._tensors.parameters.values()} - later)

    def _read_facts(self) -> None:
        """Read the optimizer's settings before it steps, because an engine steps the schedule in its own step.

        What was read first in a step counts: several optimizers may step their schedules in between. Later reads add
        parameters, because an optimizer may step one group after the other.
        """
        known = self.settings if self._has_settings else OptimizerSettings()
        self.settings = _number_settings(self._read_settings().texts | known.texts)
        if not self._has_settings:
            self.evaluated = find_evaluated(self._tensors.modules)
        self._has_settings = True

    def _read_settings(self) -> OptimizerSettings:
        names = {parameter: name for name, parameter in self._tensors.parameters.items()}
        grouped = self._adapter.find_groups(self._optimizer, names)
        return read_settings((names[parameter], group) for parameter, group in grouped)

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
        """Remember that an optimizer has stepped; its results are read later, when all ranks have them."""
        if self._clock.is_running:
            self._has_stepped = True

    def on_end(self) -> None:
        """Show the state after the step."""
        self._show_buffers(Kind.BUFFER_AFTER)  # even if no optimizer has stepped: forward passes change them
        if not self._has_settings:
            self.evaluated = find_evaluated(self._tensors.modules)
        if not self._has_stepped:
            return
        self.settings = self.settings.with_next_rates(self._read_settings())
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
            else:  # a step counter, for instance, is not sharded like the parameter
                whole = Placement(Region.whole(tuple(owned.tensor.shape)))
                self._dispatcher.visit(Visit(tensor_id, owned.tensor, whole))

    def _read_all(self) -> dict[str, torch.Tensor]:
        """Read this rank's parameters and buffers."""
        values = {name: self._adapter.read_values(each).tensor for name, each in self._tensors.parameters.items()}
        return {
            name: self._adapter.to_local(each) for name, each in (values | dict(self._tensors.buffers.read())).items()
        }

    def _show_buffers(self, kind: Kind) -> None:
        for name, buffer in self._tensors.buffers.read().items():
            self._dispatcher.visit(Visit(self._make_id(name, kind), buffer))

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
        self._dispatcher.visit(Visit(tensor_id, gradient, None, microbatch, fallback=placement))

    def _on_streamed_gradient(self, name: str, gradient: torch.Tensor | None, region: Region | None) -> None:
        """Show a streamed parameter's complete gradient, whole or of a region; None stands for zeros."""
        if not self._clock.is_running:
            return
        tensor_id, placement = self._make_id(name, Kind.PARAM_GRAD), self._tensors.generated[name].placement
        if region is not None:
            placement = replace(placement, region=region)
        if gradient is not None:
            self._dispatcher.visit(Visit(tensor_id, gradient, placement))
        else:
            dtype = self._tensors.parameters[name].dtype
            zeros = torch.zeros((), dtype=dtype, device="cpu").expand(placement.region.local_shape)
            self._dispatcher.visit(Visit(tensor_id, zeros, placement, values=ZERO, is_generated=True))

    def _show_slice(self, tensor_id: TensorId, owned: OwnedSlice, values: Distribution | None = None) -> None:
        """Show a tensor that is shaped like a parameter, or like a run of it."""
        stated, like = self._place_run(tensor_id, owned), self._tensors.generated[tensor_id.name].placement
        self._dispatcher.visit(Visit(tensor_id, owned.tensor, stated, values=values, fallback=like))

    def _place_run(self, tensor_id: TensorId, owned: OwnedSlice) -> Placement | None:
        """Find the placement of a run of a parameter's part; None if the slice is not a run."""
        if owned.run is None:
            return None
        like = self._tensors.generated[tensor_id.name].placement
        return replace(like, region=replace(like.region, flat=(owned.run,)))

    def _make_id(self, name: str, kind: Kind, slot: str = "") -> TensorId:
        return TensorId.of(self._clock.step, None, name, kind, slot=slot)


def _list_parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in read_groups(optimizer) for parameter in group["params"]}


_DECIDING = (
    *("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad", "maximize", "alpha"),
    *("rho", "lr_decay", "momentum_decay", "decoupled_weight_decay", INITIAL_RATE),
)
"""Settings of torch's optimizers that decide the value of an update, now or later; others decide how it is computed."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The distinct settings of an optimizer's groups, and which of them each parameter has."""

    groups: tuple[dict[str, str], ...] = ()
    by_parameter: Mapping[str, int] = field(default_factory=dict)
    """By name, an index into `groups`. A parameter that is in no group is left out."""

    @property
    def texts(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """The settings of each parameter."""
        return {name: tuple(self.groups[number].items()) for name, number in self.by_parameter.items()}

    def with_next_rates(self, later: OptimizerSettings) -> OptimizerSettings:
        """Add the learning rates of `later`: those of the next step, if the script has stepped its schedule."""
        rates = {name: [(NEXT_RATE, value) for key, value in text if key == "lr"] for name, text in later.texts.items()}
        return _number_settings({name: (*text, *rates.get(name, ())) for name, text in self.texts.items()})


def read_settings(grouped: Iterable[tuple[str, Mapping[str, object]]]) -> OptimizerSettings:
    """Read the settings of every parameter, given by name with its group. Groups with equal settings become one."""
    texts: dict[int, tuple[tuple[str, str], ...]] = {}  # by group, as many parameters share one
    by_parameter = {}
    for name, group in grouped:
        if id(group) not in texts:
            texts[id(group)] = tuple(
                (key, format_setting(group[key])) for key in _DECIDING if group.get(key) is not None
            )
        by_parameter[name] = texts[id(group)]
    return _number_settings(by_parameter)


def _number_settings(texts: Mapping[str, tuple[tuple[str, str], ...]]) -> OptimizerSettings:
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts.values()))}
    return OptimizerSettings(tuple(map(dict, numbers)), {name: numbers[text] for name, text in texts.items()})


Read = Callable[[], Mapping[str, torch.Tensor]]


class LoadWatch:
    """Observer of what a checkpoint loads into a model, between `attach` and the first step."""

    def __init__(self, read: Read) -> None:
        """Begin to watch; `read` returns this rank's parameters and buffers by name."""
        self._read = read
        self._before = self._sum_up()

    def find_unloaded(self) -> tuple[str, ...]:
        """Find what has not changed while other tensors have; nothing if the script loaded before it attached."""
        now = self._sum_up()
        same = [name for name, value in now.items() if value == self._before.get(name)]
        return tuple(same) if len(same) < len(now) else ()

    def _sum_up(self) -> dict[str, int]:
        return {name: _sum_bytes(tensor) for name, tensor in self._read().items()}


def _sum_bytes(tensor: torch.Tensor) -> int:
    values = tensor.detach().to("cpu").contiguous()
    return zlib.crc32(view_memory(values))
