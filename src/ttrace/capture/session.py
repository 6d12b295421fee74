"""Session: builds the parts of a traced run, and routes events to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh

from ttrace.adapters.adapter import Adapter, Optimizer
from ttrace.adapters.native.context_parallel import find_cut
from ttrace.capture import environment
from ttrace.capture.numeric_flags import read_flags, set_deterministic
from ttrace.capture.observe.compiled import Compiled
from ttrace.capture.observe.events import ModuleCall, SessionEvents
from ttrace.capture.observe.function_calls import FunctionCalls
from ttrace.capture.observe.gradient_entry import GradientEntry
from ttrace.capture.observe.hooks import Hooks
from ttrace.capture.observe.ledger import Ledger
from ttrace.capture.observe.rng_use import RngUse
from ttrace.capture.observe.step_counter import PipelineChunk, StepCounter
from ttrace.capture.observe.torch_patches import patch_torch
from ttrace.capture.plan import Plan
from ttrace.capture.probes.batches import Batches
from ttrace.capture.probes.decisions import Decisions
from ttrace.capture.probes.detail import Detail
from ttrace.capture.probes.dispatch import Dispatcher
from ttrace.capture.probes.generator import Generator
from ttrace.capture.probes.isolation import Isolate
from ttrace.capture.probes.module_tensors import ModuleTensors
from ttrace.capture.probes.probe import Probe
from ttrace.capture.probes.recorder import Recorder, open_writer
from ttrace.capture.probes.split_sums import SplitSums
from ttrace.capture.probes.twins import Perturb
from ttrace.capture.resolve.inventory import list_modules, switch_dropout_off
from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.capture.resolve.names import Names
from ttrace.capture.resolve.port_names import PortNames, make_port
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.capture.state.buffers import Buffers
from ttrace.capture.state.forward_tensors import ForwardTensors
from ttrace.capture.state.model_state import HeldTensors, ModelState
from ttrace.capture.state.streaming import Streaming
from ttrace.errors import CaptureError, TTraceError
from ttrace.layouts.ids import ROOT, Kind, Site, TensorId, make_scores_slot
from ttrace.layouts.rules import Rules
from ttrace.patches import Patches
from ttrace.reference.skip_blocks import SkippedBlocks
from ttrace.trace.format import Attachment, End, Manifest


class TracingSession(SessionEvents):
    """A session that traces a model's training steps as a plan says. `ttrace.attach` returns one."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None,
        adapter: Adapter,
        rules: Rules,
        *,
        num_microbatches: int = 1,
        grad_factor: float | None = None,
        attachment: Attachment | None = None,
    ) -> None:
        if plan.role != "reference" and plan.reference is None:
            raise CaptureError(f"a {plan.role} needs the reference's trace: `ttrace trace --reference DIR`.")
        self._patches = Patches()
        """Everything that `close` removes, the last one first."""
        self._flags: dict[str, str] = {}
        if plan.deterministic:
            set_deterministic(self._patches)
        try:
            self._build(plan, model, optimizer, adapter, rules, num_microbatches, grad_factor, attachment)
        except BaseException:
            self._patches.remove()
            raise

    def _build(
        self,
        plan: Plan,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None,
        adapter: Adapter,
        rules: Rules,
        num_microbatches: int,
        grad_factor: float | None,
        attachment: Attachment | None,
    ) -> None:
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        reference = ReferenceTrace(plan.trusted)
        self._plan = plan
        self._adapter = adapter
        self._clock = StepCounter(plan.first_step)
        self._given_factor = grad_factor
        self._grad_factor = self._read_factor()
        self._divisor = 1
        port = make_port(plan, chunks, adapter.name, reference)
        self._names = PortNames(port)
        self._resolver = LayoutResolver(adapter, rules, reference, num_microbatches, port)
        names = Names(chunks, adapter.name)
        self._generator = Generator(plan, adapter, self._resolver, reference, names.list_table_lengths(), port)
        self._repeated = names.find_repeated()
        parameters, aliases = names.parameters(reference.aliases)
        generated = self._generator.fill_parameters(parameters)
        if plan.parameters != "own":
            adapter.on_parameters_replaced(optimizer)
        streaming = self._streaming = Streaming.of(parameters.values())
        # A reference that is larger than memory takes long, and isolation needs only the accused modules of it.
        has_skipped = plan.role != "candidate" and plan.isolated and plan.inside and streaming.num_streamed
        self._skipped = SkippedBlocks(dict(names.modules()) if has_skipped else {}, plan.inside)
        self._patches.on_remove(self._skipped.remove)
        # Reference and twins must be traced in full, because tolerances come from them.
        self._compiled = Compiled(names, runs_eagerly=plan.role != "candidate" or plan.compiled == "eager")
        self._patches.on_remove(self._compiled.remove)
        without_dropout = switch_dropout_off(names, self._patches)
        manifest = Manifest(
            role=plan.role,
            rank=adapter.coord.rank,
            num_ranks=adapter.mesh.num_ranks,
            mesh=str(adapter.mesh),
            seed=plan.seed,
            launch=plan.launch,
            num_microbatches=num_microbatches,
            first_step=plan.first_step,
            isolated=plan.isolated,
            modules=self._names.rename_keys(list_modules(names)),
            parameters=self._names.rename_keys({name: each.requires_grad for name, each in parameters.items()}),
            aliases={self._names.rename(alias): self._names.rename(name) for alias, name in aliases.items()},
            padding=self._names.find_padding({name: each.placement for name, each in generated.items()}),
            opaque=self._names.rename_all(self._compiled.opaque),
            passed=self._skipped.blocks,
            divided=self._names.rename_all(adapter.divided),
            untraced=(*adapter.untraced, *streaming.untraced),
            reduced=tuple(sorted(adapter.reduced_axes)),
            notes=(*without_dropout, *self._compiled.notes(), *adapter.notes, *streaming.notes),
            attachment=attachment,
            versions=environment.read_versions(),
            environment=environment.read_environment(),
        )
        held = (adapter.to_local(parameter) for parameter in parameters.values())
        detail = Detail(plan, reference, held, adapter.mesh.num_ranks)
        self._recorder = Recorder(open_writer(plan, manifest), plan, detail, adapter.to_local)
        for problem in adapter.find_disagreements({name: each.placement for name, each in generated.items()}):
            self._recorder.keep(problem)
        replays = plan.decisions == "replayed" and plan.role != "reference"
        self._decisions = Decisions(self._resolver, reference) if replays else None
        self._isolate = Isolate(plan, adapter, self._resolver, reference) if plan.isolated else None
        nudge = Perturb(plan.twin, plan.seed, adapter, isolated=plan.isolated) if plan.role == "twin" else None
        entry = GradientEntry() if nudge is not None else None
        self._sums = SplitSums(plan.twin, plan.seed) if plan.role == "twin" else nullcontext()
        # A tensor is recorded before isolation replaces it; outside of isolation, a twin's nudge is recorded with it.
        chain = (self._recorder, self._isolate, nudge) if plan.isolated else (nudge, self._recorder)
        probes: tuple[Probe, ...] = tuple(probe for probe in chain if probe is not None)
        self._dispatcher = Dispatcher(
            self._clock, self._resolver, self._recorder, probes, port, infers=detail.may_sketch
        )
        known = adapter, self._clock, self._resolver, reference, self._dispatcher, self._recorder, self._isolate, entry
        self._tensors = ForwardTensors(*known, nudge=nudge) if plan.forward_only else ModuleTensors(*known)
        self._batches = Batches(self._clock, self._resolver, self._generator, self._dispatcher)
        self.is_closed = self._is_in_step = False
        self._hooks = Hooks(self._compiled.watched, self, without_gradients=plan.forward_only)
        self._patches.on_remove(self._hooks.remove)
        operations, hooks, clock = reference.operations, self._hooks, self._clock
        self._calls = FunctionCalls(plan.inside, parameters, operations, hooks, clock, self._on_call)
        watched, append = self._compiled.watched, self._recorder.write_collective
        self._ledger = Ledger(plan, adapter, clock, watched, append, self._calls)
        self._patches.on_remove(self._ledger.remove)
        self._rng_use = RngUse(self._compiled.watched, lambda: self._clock.is_watched)
        self._patches.on_remove(self._rng_use.remove)
        self._buffers = Buffers(names.buffers, is_reference=plan.role == "reference")
        tensors = HeldTensors(parameters, self._buffers, generated)
        self._state = ModelState(
            plan, adapter, optimizer, tensors, self._dispatcher, self._clock, self._isolate, self._recorder.keep
        )
        self._patches.on_remove(self._state.remove)
        self._patches.on_remove(adapter.detach)
        adapter.attach(self)
        self._optimizer = optimizer
        if optimizer is not None:
            for handle in adapter.watch_steps(optimizer, self._state.on_step_begin, self._state.on_optimizer_step):
                self._patches.on_remove(handle.remove)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Trace this block as one optimizer update. After the plan's last step, close the trace and end the script."""
        self._is_in_step = True
        try:
            with self._traced_step() if self._clock.step < self._plan.end_step else nullcontext():
                yield
        finally:
            self._is_in_step = False

    @contextmanager
    def _traced_step(self) -> Iterator[None]:
        try:
            calls, compiled = self._calls if self._plan.inside else nullcontext(), self._compiled.running()
            with self._clock.running(), patch_torch(self), calls, compiled, self._sums:
                self._ledger.begin_step()
                self._state.on_start()
                yield
                self._tensors.flush()
                if self._optimizer is None:
                    self._state.on_final_gradients()
                self._state.on_end()
                self._grad_factor = self._read_factor()  # a script may set it in each step
                self._flags = read_flags()
        finally:
            self._recorder.flush()
        if self._clock.step == self._plan.end_step:
            self.close()
            if self._plan.stop:
                sys.exit(0)

    def _read_factor(self) -> float:
        """Read the factor that a later reduction still applies to gradients."""
        return self._adapter.grad_factor if self._given_factor is None else self._given_factor

    @property
    def out(self) -> Path:
        """The folder of the trace."""
        return self._plan.out

    def batch(self, batch: Any) -> Any:
        """Return this rank's part of generated data with the batch's own shapes, ranges and dtypes."""
        if self._clock.is_running:
            return self._batches.generate(batch)
        if not self._is_in_step and not self.is_closed:
            raise CaptureError(
                "session.batch was called outside of a step, where no data can be generated. Call it inside of "
                "`with session.step():`."
            )
        return batch

    def begin_microbatch(self) -> None:
        """Begin the next microbatch of this rank; without it, each call of the model begins one."""
        self._clock.begin_microbatch()
        self._hooks.begin_microbatch()

    def generate(self, data: dict[str, Any], number: int, *, exact: bool = False) -> dict[str, Any]:
        """Return generated data for this microbatch; with `exact`, integers in the range of the given ones."""
        return self._batches.replace(data, number, exact=exact) if self._clock.is_running else data

    def compare(self, slot: str, data: torch.Tensor, number: int) -> None:
        """Record data that the script keeps, so that it is known whether both sides have the same."""
        if self._clock.is_running:
            self._batches.compare(slot, data, number)

    def keep(self, batch: Any, number: int) -> None:
        """Record the script's own data of this rank's microbatch of this number."""
        if self._clock.is_running:
            self._batches.keep(batch, number)

    def close(self) -> None:
        """Remove the hooks and complete the trace; a second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            try:
                self._patches.remove()
            except Exception as error:  # an object of another package refused; the trace is complete all the same
                self._recorder.keep(f"a patch could not be put back: {type(error).__name__}: {error}")
            notes = (*self._state.notes, *(self._isolate.notes() if self._isolate else ()), *self._names.notes())
            end = End(
                num_steps=self._clock.step,
                grad_factor=self._grad_factor / self._divisor,
                splits={axis: str(split) for axis, split in self._resolver.splits.items()},
                batch_axes=self._resolver.batch_axes,
                settings=self._state.settings.groups,
                settings_of=self._names.rename_keys(self._state.settings.by_parameter),
                forward_buffers=self._names.rename_all(self._buffers.changed),
                samples=self._batches.kept,
                replaced=self._batches.replaced,
                unloaded=self._names.rename_all(self._state.unloaded),
                random=self._names.rename_all(self._rng_use.modules),
                flags=self._flags,
                notes=(*self._resolver.list_unused_rules(), *notes, *self._ledger.notes),
                operations=self._calls.operations,
                sources=environment.fingerprint_sources(),
            )
            self._recorder.close(end)

    # Events of modules

    def on_call(self, name: str, *, again: bool) -> ModuleCall | None:
        """Begin a call of a module that is about to run, or to be recomputed; return None if it is not watched."""
        clock = self._clock
        if not clock.is_watched or (again and not clock.is_repeat_clear(name)):
            return None
        if again and self._streaming.recomputes:
            return None
        if not self._adapter.is_watched(name, isolated=self._plan.isolated) or self._skipped.is_skipped(name):
            return None
        number = 0 if again else clock.count_forward(name, is_repeated=name in self._repeated)
        return ModuleCall(name, clock.step, clock.microbatch, number, again)

    def on_tensor(self, call: ModuleCall, kind: Kind, slot: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Show a tensor of a call to the probes."""
        with self._calls.pause():
            return self._tensors.visit(call, kind, slot, tensor)

    # Events of the framework

    def on_pipeline(self) -> None:
        """Count chunks from now on, as a pipeline is about to run."""
        self._clock.is_pipelined = True

    def on_chunk(self, microbatch: int, *, is_first: bool, is_last: bool) -> AbstractContextManager[None]:
        """Return the context in which a pipeline stage works on one microbatch."""
        return self._clock.in_chunk(PipelineChunk(microbatch, is_first, is_last))

    def on_loss(self, loss: torch.Tensor) -> None:
        """Record the loss, from which backward starts."""
        self._buffers.on_backward()
        number = self._clock.microbatch
        self._dispatcher.visit(self._dispatcher.id_of(Site(ROOT, Kind.LOSS), number), loss, number)

    def on_auxiliary_loss(self, loss: torch.Tensor) -> None:
        """Record a module's own loss as soon as its gradient, which shows its weight, arrives."""
        call = self._hooks.innermost()
        if call is not None and loss.requires_grad:
            self._tensors.watch_loss(call, loss)

    def on_divide(self, divisor: int) -> None:
        """Remember the number by which the sum of all microbatches' gradients will be divided."""
        self._divisor = divisor

    def on_main_gradients(self, gradients: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Record the sums over this rank's microbatches, before any reduction."""
        self._state.on_main_gradients(gradients)

    # Events of torch functions

    def on_backward(self, roots: tuple[torch.Tensor | GradientEdge, ...]) -> None:
        """Record the loss from which a backward pass starts; in a pipeline, the adapter reports the loss.

        A node of the graph has no value that could be recorded.
        """
        self._buffers.on_backward()
        tensors = [root for root in roots if isinstance(root, torch.Tensor)]
        is_reported = self._clock.is_pipelined or self._adapter.is_in_loss
        if len(tensors) == len(roots) == 1 and tensors[0].numel() == 1 and not is_reported:
            self.on_loss(tensors[0])

    def on_final_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record the final gradients before they are clipped: one wrong gradient would rescale them all."""
        self._state.on_final_gradients(tensors)

    def on_grad_norm(self, norm: torch.Tensor) -> None:
        """Record the norm of all gradients before they are clipped."""
        self._record_scalar(Kind.GRAD_NORM, norm)

    def on_clip(self, factor: torch.Tensor) -> None:
        """Record the factor by which gradients are about to be clipped."""
        self._record_scalar(Kind.CLIP, factor)

    def _record_scalar(self, kind: Kind, value: torch.Tensor) -> None:
        if kind not in self._streaming.untraced:
            self._dispatcher.visit(TensorId.of(self._clock.step, None, ROOT, kind), self._adapter.to_full(value))

    def on_topk(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        """Record what this run chose and the scores it chose by, and return the reference's choice if it is known."""
        call = self._hooks.innermost()
        if call is None or not scores.is_floating_point():
            return None
        slot = str(call.number_of(Kind.DECISION))
        choice, reasons = (
            self._tensors.make_id(call, Site(call.name, Kind.DECISION, name)) for name in (slot, make_scores_slot(slot))
        )
        # A recomputed choice is recorded only if it is the first: auxiliary losses choose only if gradients are on.
        self._dispatcher.visit(reasons, scores, call.microbatch)
        self._dispatcher.visit(choice, chosen, call.microbatch)
        if self._decisions is None or type(chosen) is not torch.Tensor:
            return None
        return self._dispatcher.replay(self._decisions, choice, chosen, call.microbatch)

    def on_collective(self, name: str, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Enter a collective into the ledger, and run it."""
        return self._ledger.observe(name, arguments, run)

    def on_wait(self, work: Any) -> None:
        self._ledger.on_wait(work)

    def on_sequence_split(self, mesh: DeviceMesh, size: int, held: torch.Tensor) -> None:
        """Learn how context_parallel splits a sequence."""
        try:
            self._resolver.set_split(find_cut(mesh, size, held))
        except TTraceError as error:
            self._recorder.keep(str(error))

    def _on_call(self, call: ModuleCall, kind: Kind, slot: str, tensor: torch.Tensor) -> None:
        self._dispatcher.visit(self._tensors.make_id(call, Site(call.name, kind, slot)), tensor, call.microbatch)
