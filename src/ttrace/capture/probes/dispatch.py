"""Dispatcher of live tensors: gives each its id and its placement, and passes it down the chain of probes."""

from __future__ import annotations

from dataclasses import replace

import torch

from ttrace.capture.observe.step_counter import StepCounter
from ttrace.capture.probes.decisions import Decisions
from ttrace.capture.probes.probe import Probe, Visit, pass_down
from ttrace.capture.probes.recorder import Recorder
from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.errors import TTraceError
from ttrace.layouts.holds import HeldIndices
from ttrace.layouts.ids import Site, TensorId
from ttrace.layouts.placement import Placement
from ttrace.ports.port import Port, Ported
from ttrace.values.generate import Distribution


class Dispatcher:
    """Dispatcher that every tensor of the traced steps passes through."""

    def __init__(
        self,
        clock: StepCounter,
        resolver: LayoutResolver,
        recorder: Recorder,
        probes: tuple[Probe, ...],
        port: Port | None = None,
        *,
        infers: bool,
    ) -> None:
        """With `infers`, infer layouts during the run, as a sketch needs them; otherwise the judge infers them."""
        self._clock = clock
        self._resolver = resolver
        self._recorder = recorder
        self._probes = probes
        self._port = port
        self._summands: dict[tuple[TensorId, int], list[torch.Tensor]] = {}
        """The gradients that parts have sent so far to the input that they share."""
        self._infers = infers

    def visit(
        self,
        tensor_id: TensorId,
        tensor: torch.Tensor,
        microbatch: int = 0,
        *,
        entry: bool = False,
        values: Distribution | None = None,
        stated: Placement | None = None,
        fallback: Placement | None = None,
        held: HeldIndices | None = None,
        is_generated: bool = False,
    ) -> torch.Tensor | None:
        """Show a tensor to the probes; return the tensor to use in its place, if any."""
        if tensor.is_complex():  # rotary embeddings; a trace holds real numbers, and complex ones are not nudged
            # With its graph: isolation may replace it, and what the module gets must be complex and have a gradient.
            real = torch.view_as_real(tensor.resolve_conj())
            other = self.visit(
                tensor_id,
                real,
                microbatch,
                values=values,
                stated=stated,
                fallback=fallback,
                held=held,
                is_generated=is_generated,
            )
            return None if other is None else torch.view_as_complex(other.contiguous())
        placement = stated or self.resolve(tensor_id, tensor, microbatch, held, fallback)
        if placement is None and self._infers:
            placement = self._resolver.infer(tensor_id, tensor)
        visit = Visit(tensor_id, tensor, placement, microbatch, entry, values, is_generated)
        return pass_down(self._probes, visit) if self._port is None else self._pass_ported(self._port, visit)

    def _pass_ported(self, port: Port, visit: Visit) -> torch.Tensor | None:
        """Show a tensor under the candidate's name and with the dims that it has there."""
        ported = port.port(visit.id.site, visit.tensor.ndim)
        if ported is None:
            return None
        ported_visit = replace(
            visit,
            id=visit.id._replace(site=ported.site),
            tensor=ported.apply(visit.tensor),
            placement=None if visit.placement is None else ported.place(visit.placement),
            is_part=ported.part is not None,
        )
        if ported.is_summand and ported.part is not None:
            summands = self._summands.setdefault((ported_visit.id, ported_visit.microbatch), [])
            summands.append(ported_visit.tensor.detach())
            if len(summands) < ported.part.count:
                return None
            ported_visit = replace(
                ported_visit, tensor=torch.stack(self._summands.pop((ported_visit.id, ported_visit.microbatch))).sum(0)
            )
        other = pass_down(self._probes, ported_visit)
        return None if other is None else ported.undo(other)

    def is_ignored(self, site: Site, tensor: torch.Tensor) -> bool:
        """Whether a port ignores this site."""
        return self._port is not None and self._find_ported(site, tensor) is None

    def _find_ported(self, site: Site, tensor: torch.Tensor) -> Ported | None:
        return None if self._port is None else self._port.port(site, tensor.ndim)

    def find_id(self, tensor_id: TensorId, tensor: torch.Tensor) -> TensorId:
        """Return the id under which a tensor is recorded: in a port, the candidate's."""
        ported = self._find_ported(tensor_id.site, tensor)
        return tensor_id if ported is None else tensor_id._replace(site=ported.site)

    def replay(
        self, decisions: Decisions, choice: TensorId, chosen: torch.Tensor, microbatch: int
    ) -> torch.Tensor | None:
        """Return the reference's choice in place of one that was made here."""
        placement = self.resolve(choice, chosen, microbatch)
        ported = self._find_ported(choice.site, chosen)
        if ported is None:
            return decisions.replay(choice, chosen, placement)
        placement = None if placement is None else ported.place(placement)
        other = decisions.replay(choice._replace(site=ported.site), ported.apply(chosen), placement)
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
        """Find where a tensor lies, if anything states it; a rule that does not fit is reported at the trace's end."""
        try:
            return self._resolver.resolve(tensor_id, tensor, microbatch, held) or fallback
        except TTraceError as error:
            if not tensor_id.kind.is_of_call:  # a rule for a module need not fit the operations inside it
                self._recorder.keep(str(error))
            return None

    def id_of(self, site: Site, number: int, *, step: int | None = None, call: int = 0) -> TensorId:
        """Return the id of a site in this rank's microbatch; microbatches that are parts of one tensor share an id."""
        microbatch = None if self._resolver.runs_together(site) else self._resolver.count_microbatch(number)
        return TensorId(self._clock.step if step is None else step, microbatch, site, call)
