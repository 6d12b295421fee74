"""Tensors of module calls, on their way from a hook to the probes."""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from ttrace.adapters.adapter import Adapter
from ttrace.capture.observe.events import ModuleCall
from ttrace.capture.observe.gradient_entry import GradientEntry
from ttrace.capture.observe.step_counter import StepCounter
from ttrace.capture.probes.dispatch import Dispatcher
from ttrace.capture.probes.isolation import Isolate
from ttrace.capture.probes.probe import Visit
from ttrace.capture.probes.recorder import Recorder
from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.errors import TTraceError
from ttrace.layouts.holds import find_held
from ttrace.layouts.ids import ROOT, Kind, Site, TensorId

_NUM_RECALLED = 32
"""Number of the reference's tensors that are cached: every tensor of every expert needs the same routing."""


class ModuleTensors:
    """Router of the inputs, outputs and gradients of module calls: it gives each its id and shows it to the probes."""

    def __init__(
        self,
        adapter: Adapter,
        clock: StepCounter,
        resolver: LayoutResolver,
        reference: ReferenceTrace,
        dispatcher: Dispatcher,
        recorder: Recorder,
        isolate: Isolate | None,
        gradient_entry: GradientEntry | None,
    ) -> None:
        self._adapter = adapter
        self._clock = clock
        self._resolver = resolver
        self._reference = reference
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._isolate = isolate
        self._gradient_entry = gradient_entry

        @lru_cache(maxsize=_NUM_RECALLED)
        def recall(step: int, site: Site, microbatch: int) -> torch.Tensor | None:
            return reference.tensor(TensorId(step, microbatch, site))

        self._recall = recall

    def visit(self, call: ModuleCall, kind: Kind, slot: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Show a tensor of a call; return the tensor to use in its place, if any."""
        if call.name in self._adapter.divided and not self._is_models_own(kind):
            return None
        site = Site(call.name, kind, slot)
        if self._dispatcher.is_ignored(site, tensor):
            return None
        if self._record_shares(call, site, tensor):
            return None
        if kind is Kind.INPUT and call.name == ROOT:
            self._resolver.observe_batch(TensorId(call.step, call.microbatch, site), tuple(tensor.shape))
        tensor_id = self.make_id(call, site)
        is_input = kind in (Kind.INPUT, Kind.RECOMPUTE_INPUT)
        if is_input:
            call.held = call.held or find_held(tensor)
        held = None if is_input else call.held
        stated = call.gradients.get((kind.primal, slot)) if kind.is_activation_grad else None
        if not kind.is_activation_grad and (placement := self._resolver.resolve_gradient(tensor)) is not None:
            call.gradients[kind.primal, slot] = placement
        values = self._isolate.distribution(self._dispatcher.find_id(tensor_id, tensor)) if self._isolate else None
        entry = call.is_entry(kind) or self._is_gradient_entry(call, kind, tensor)
        return self._dispatcher.visit(
            tensor_id, tensor, call.microbatch, entry=entry, values=values, stated=stated, held=held
        )

    def flush(self) -> None:
        """Show what was kept until the end of the step: nothing."""

    def watch_loss(self, call: ModuleCall, loss: torch.Tensor) -> None:
        """Show a module's own loss, times its weight, when its gradient arrives."""
        tensor_id = self.make_id(call, Site(call.name, Kind.LOSS, str(call.number_of(Kind.LOSS))))

        def on_gradient(gradient: torch.Tensor) -> None:
            self._dispatcher.visit(tensor_id, loss.detach() * gradient, call.microbatch)

        loss.register_hook(on_gradient)

    def make_id(self, call: ModuleCall, site: Site) -> TensorId:
        """Make the id of a site in a call."""
        return self._dispatcher.id_of(site, call.microbatch, step=call.step, call=call.number)

    def _is_models_own(self, kind: Kind) -> bool:
        """Whether this enters or leaves a divided module as a whole, and not between two of its stages."""
        chunk = self._clock.chunk
        if chunk is None:
            return True
        return chunk.is_first if kind.primal is Kind.INPUT else chunk.is_last

    def _is_gradient_entry(self, call: ModuleCall, kind: Kind, tensor: torch.Tensor) -> bool:
        """Whether gradients enter the model here; in a pipeline they enter at its last stage."""
        entry, chunk = self._gradient_entry, self._clock.chunk
        return entry is not None and (chunk is None or chunk.is_last) and entry.is_at(call, kind, tensor)

    def _record_shares(self, call: ModuleCall, site: Site, tensor: torch.Tensor) -> bool:
        """If a tensor has rows of several microbatches, record it for each of them; return whether it has."""
        try:
            shares = self._adapter.split_rows(site, tensor, call.microbatch, partial(self._recall, call.step))
        except TTraceError as error:
            self._recorder.keep(str(error))
            return True
        for share in shares or ():
            tensor_id = TensorId(call.step, share.microbatch, site, call.number)
            rows = tensor.detach()[share.rows.to(tensor.device)]
            self._recorder.visit(Visit(tensor_id, rows, share.placement, call.microbatch))
        return shares is not None
