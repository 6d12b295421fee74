"""The way of a live tensor to the probes.

Hooks report a tensor of a module call to `ModuleTensors`, which makes its id and a `Visit`. The `Dispatcher` adds the
placement and shows the visit to each probe. Tensors that no hook sees, such as gradients and batches, go to the
dispatcher directly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial

import torch

from ttrace.adapters.adapter import Adapter
from ttrace.capture.observe.events import ModuleCall, StepCounter
from ttrace.capture.observe.hooks import GradientEntry
from ttrace.capture.probes.isolation import Decisions, Isolate
from ttrace.capture.probes.probe import Probe, Visit
from ttrace.capture.probes.recorder import Recorder
from ttrace.capture.probes.twins import Perturb
from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.errors import TTraceError
from ttrace.layouts.holds import HeldIndices, find_held
from ttrace.layouts.ids import ROOT, Kind, Site, TensorId
from ttrace.layouts.placement import Placement
from ttrace.ports.port import Port, Ported

_NUM_RECALLED = 32
"""Number of the reference's tensors that are cached: every tensor of every expert needs the same routing."""


@dataclass(eq=False)
class Dispatcher:
    """Dispatcher that every tensor of the traced steps passes through."""

    clock: StepCounter
    resolver: LayoutResolver
    recorder: Recorder
    probes: tuple[Probe, ...]
    _port: Port | None = None
    _: KW_ONLY
    infers: bool
    """Whether layouts are inferred during the run, as a sketch needs them; otherwise the judge infers them."""

    def __post_init__(self) -> None:
        self._summands: dict[tuple[TensorId, int], list[torch.Tensor]] = {}
        """The gradients that parts have sent so far to the input that they share."""

    def visit(self, visit: Visit) -> torch.Tensor | None:
        """Show a tensor to the probes, each probe's replacement to the next one; return the last one, if any."""
        if visit.tensor.is_complex():  # rotary embeddings; a trace holds real numbers, and complex ones are not nudged
            # With its graph: isolation may replace it, and what the module gets must be complex and have a gradient.
            real = torch.view_as_real(visit.tensor.resolve_conj())
            other = self.visit(visit._replace(tensor=real, entry=False))
            return None if other is None else torch.view_as_complex(other.contiguous())
        shown = self._place(visit)
        ported = None
        if self._port is not None:
            ported = self._port.port(visit.id.site, visit.tensor.ndim)
            complete = None if ported is None else self._apply_port(ported, shown)
            if complete is None:
                return None
            shown = complete
        current = shown
        for probe in self.probes:  # no function for this loop: the way from a hook to the disk is meant to be short
            other = probe.visit(current)
            if other is not None:
                current = current._replace(tensor=other)
        if current is shown:
            return None
        return current.tensor if ported is None else ported.undo(current.tensor)

    def _place(self, visit: Visit) -> Visit:
        if visit.placement is not None:
            return visit
        placement = self.resolve(visit.id, visit.tensor, visit.microbatch, visit.held, visit.fallback)
        if placement is None and self.infers:
            placement = self.resolver.infer(visit.id, visit.tensor)
        return visit if placement is None else visit._replace(placement=placement)

    def _apply_port(self, ported: Ported, visit: Visit) -> Visit | None:
        """Return a visit under the candidate's name and with the dims that the tensor has there.

        None if the tensor is one summand of several, and others are still to come.
        """
        shown = visit._replace(
            id=visit.id._replace(site=ported.site),
            tensor=ported.apply(visit.tensor),
            placement=None if visit.placement is None else ported.place(visit.placement),
            is_part=ported.part is not None,
        )
        if ported.is_summand and ported.part is not None:
            key = shown.id, shown.microbatch
            summands = self._summands.setdefault(key, [])
            summands.append(shown.tensor.detach())
            if len(summands) < ported.part.count:
                return None
            return shown._replace(tensor=torch.stack(self._summands.pop(key)).sum(0))
        return shown

    def is_ignored(self, site: Site, tensor: torch.Tensor) -> bool:
        """Whether a port ignores this site."""
        return self._port is not None and self._find_ported(site, tensor) is None

    def _find_ported(self, site: Site, tensor: torch.Tensor) -> Ported | None:
        return None if self._port is None else self._port.port(site, tensor.ndim)

    def find_id(self, tensor_id: TensorId, tensor: torch.Tensor) -> TensorId:
        """Return the id under which a tensor is recorded: in a port, the candidate's."""
        ported = self._find_ported(tensor_id.site, tensor)
        return tensor_id if ported is None else tensor_id._replace(site=ported.site)

    def replay(self, decisions: Decisions, choice: Visit) -> torch.Tensor | None:
        """Return the reference's choice in place of one that was made here."""
        chosen = choice.tensor
        placement = self.resolve(choice.id, chosen, choice.microbatch)
        ported = self._find_ported(choice.id.site, chosen)
        if ported is None:
            return decisions.replay(choice.id, chosen, placement)
        placement = None if placement is None else ported.place(placement)
        other = decisions.replay(choice.id._replace(site=ported.site), ported.apply(chosen), placement)
        return None if other is None else ported.undo(other)

    def port(self, tensor_id: TensorId, tensor: torch.Tensor, placement: Placement) -> tuple[torch.Tensor, Placement]:
        """Return a view of a tensor, and its placement, as it is recorded."""
        ported = self._find_ported(tensor_id.site, tensor)
        return (tensor, placement) if ported is None else (ported.apply(tensor), ported.place(placement))

    def resolve(
        self,
        tensor_id: TensorId,
        tensor: torch.Tensor,
        microbatch: int = 0,
        held: HeldIndices | None = None,
        fallback: Placement | None = None,
    ) -> Placement | None:
        """Find where a tensor lies, if anything states it.

        A rule that does not fit is reported at the end of the trace, and then `fallback` does not apply either.
        """
        try:
            return self.resolver.resolve(tensor_id, tensor, microbatch, held) or fallback
        except TTraceError as error:
            if not tensor_id.kind.is_of_call:  # a rule for a module need not fit the operations inside it
                self.recorder.add_problem(str(error))
            return None

    def id_of(self, site: Site, number: int, *, step: int | None = None, call: int = 0) -> TensorId:
        """Return the id of a site in this rank's microbatch; microbatches that are parts of one tensor share an id."""
        microbatch = None if self.resolver.runs_together(site) else self.resolver.count_microbatch(number)
        return TensorId(self.clock.step if step is None else step, microbatch, site, call)


@dataclass(eq=False)
class ModuleTensors:
    """Observer of module calls: it makes the visit of each input, output and gradient of a call."""

    adapter: Adapter
    clock: StepCounter
    resolver: LayoutResolver
    reference: ReferenceTrace
    dispatcher: Dispatcher
    recorder: Recorder
    _: KW_ONLY
    isolate: Isolate | None
    nudge: Perturb | None
    """In a twin, what nudges it."""

    def __post_init__(self) -> None:
        self._gradient_entry = None if self.nudge is None else GradientEntry()
        self.pause: Callable[[], AbstractContextManager[None]] = nullcontext
        """What to enter around each visit: probes compute, too. It is set later, as `FunctionCalls` needs the hooks."""

        @lru_cache(maxsize=_NUM_RECALLED)
        def recall(step: int, site: Site, microbatch: int) -> torch.Tensor | None:
            return self.reference.tensor(TensorId(step, microbatch, site))

        self._recall = recall

    def visit(self, call: ModuleCall, kind: Kind, slot: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Show a tensor of a call; return the tensor to use in its place, if any."""
        with self.pause():
            visit = self._make_visit(call, kind, slot, tensor)
            return None if visit is None else self.dispatcher.visit(visit)

    def _make_visit(self, call: ModuleCall, kind: Kind, slot: str, tensor: torch.Tensor) -> Visit | None:
        """Make the visit of a tensor; None if it is not shown, or has been recorded here."""
        if call.name in self.adapter.divided and not self._is_models_own(kind):
            return None
        site = Site(call.name, kind, slot)
        if self.dispatcher.is_ignored(site, tensor):
            return None
        if self._record_shares(call, site, tensor):
            return None
        if kind is Kind.INPUT and call.name == ROOT:
            self.resolver.observe_batch(TensorId(call.step, call.microbatch, site), tuple(tensor.shape))
        tensor_id = self.make_id(call, site)
        is_input = kind in (Kind.INPUT, Kind.RECOMPUTE_INPUT)
        if is_input:
            call.held = call.held or find_held(tensor)
        stated = call.gradients.get((kind.primal, slot)) if kind.is_activation_grad else None
        if not kind.is_activation_grad and (placement := self.resolver.resolve_gradient(tensor)) is not None:
            call.gradients[kind.primal, slot] = placement
        return Visit(
            tensor_id,
            tensor,
            stated,
            call.microbatch,
            entry=call.is_entry(kind) or self._is_gradient_entry(call, kind, tensor),
            values=self.isolate.distribution(self.dispatcher.find_id(tensor_id, tensor)) if self.isolate else None,
            held=None if is_input else call.held,
        )

    def flush(self) -> None:
        """Show what was collected until the end of the step: here nothing."""

    def show_result(self, call: ModuleCall, kind: Kind, slot: str, tensor: torch.Tensor) -> None:
        """Show the result of an operation inside a call, or the gradient of that result."""
        self.dispatcher.visit(Visit(self.make_id(call, Site(call.name, kind, slot)), tensor, None, call.microbatch))

    def watch_loss(self, call: ModuleCall, loss: torch.Tensor) -> None:
        """Show a module's own loss, times its weight, when its gradient arrives."""
        tensor_id = self.make_id(call, Site(call.name, Kind.LOSS, str(call.number_of(Kind.LOSS))))

        def on_gradient(gradient: torch.Tensor) -> None:
            self.dispatcher.visit(Visit(tensor_id, loss.detach() * gradient, None, call.microbatch))

        loss.register_hook(on_gradient)

    def make_id(self, call: ModuleCall, site: Site) -> TensorId:
        """Make the id of a site in a call."""
        return self.dispatcher.id_of(site, call.microbatch, step=call.step, call=call.number)

    def _is_models_own(self, kind: Kind) -> bool:
        """Whether this enters or leaves a divided module as a whole, and not between two of its stages."""
        chunk = self.clock.chunk
        if chunk is None:
            return True
        return chunk.is_first if kind.primal is Kind.INPUT else chunk.is_last

    def _is_gradient_entry(self, call: ModuleCall, kind: Kind, tensor: torch.Tensor) -> bool:
        """Whether gradients enter the model here; in a pipeline they enter at its last stage."""
        entry, chunk = self._gradient_entry, self.clock.chunk
        return entry is not None and (chunk is None or chunk.is_last) and entry.is_at(call, kind, tensor)

    def _record_shares(self, call: ModuleCall, site: Site, tensor: torch.Tensor) -> bool:
        """If a tensor has rows of several microbatches, record it for each of them; return whether it has."""
        try:
            shares = self.adapter.split_rows(site, tensor, call.microbatch, partial(self._recall, call.step))
        except TTraceError as error:
            self.recorder.add_problem(str(error))
            return True
        for share in shares or ():
            tensor_id = TensorId(call.step, share.microbatch, site, call.number)
            rows = tensor.detach()[share.rows.to(tensor.device)]
            self.recorder.visit(Visit(tensor_id, rows, share.placement, call.microbatch))
        return shares is not None


_SEQUENCE = 1
"""The dim of the sequence, behind the dim of samples."""


class ForwardTensors(ModuleTensors):
    """Observer of module calls in an iteration without a backward pass, such as generation with a cache.

    Generation calls a model for a prompt, or for parts of it, and then for each token. What enters and leaves a module
    in these calls are parts of one sequence. They are collected until the step ends, put together, and compared with
    what one call for the whole sequence has. Masks and caches have more dims and are left out.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parts: dict[tuple[int, Site], list[torch.Tensor]] = {}

    def visit(self, call: ModuleCall, kind: Kind, slot: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Collect one part of a sequence; in a twin, nudge the output of an embedding."""
        site = Site(call.name, kind, slot)
        other = None
        with self.pause():
            if kind not in (Kind.INPUT, Kind.OUTPUT) or not tensor.is_floating_point() or tensor.ndim not in (2, 3):
                return None
            if self.nudge is not None and kind is Kind.OUTPUT and not call.takes_floats:
                other = self.nudge.visit(Visit(TensorId(call.step, 0, site), tensor, entry=True))
            self._parts.setdefault((call.step, site), []).append((tensor if other is None else other).detach().clone())
        return other

    def flush(self) -> None:
        """Show every sequence that is complete now."""
        joined = {
            TensorId(step, 0, site): torch.cat(parts, _SEQUENCE)
            for (step, site), parts in self._parts.items()
            if len({(part.shape[0], *part.shape[_SEQUENCE + 1 :]) for part in parts}) == 1
        }
        self._parts.clear()
        shapes = {
            tensor_id: self.reference.shape(tensor_id) or tuple(tensor.shape) for tensor_id, tensor in joined.items()
        }
        is_as_long = any(tuple(tensor.shape) == shapes[tensor_id] for tensor_id, tensor in list(joined.items())[:1])
        for tensor_id, tensor in joined.items():
            # Each chunk of a prompt has the logits of its last token, of which only those of the last chunk are used.
            if is_as_long and len(shapes[tensor_id]) == tensor.ndim:
                tensor = tensor[:, -shapes[tensor_id][_SEQUENCE] :]
            self.dispatcher.visit(Visit(tensor_id, tensor))
