"""Session of a traced run: it routes events to its parts, which `parts.py` makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh

from ttrace.adapters.native.adapter import find_cut
from ttrace.capture import environment
from ttrace.capture.environment import read_flags, set_deterministic
from ttrace.capture.observe.events import ModuleCall, PipelineChunk, SessionEvents
from ttrace.capture.observe.loaders import watch_last_loader
from ttrace.capture.observe.torch_patches import patch_torch
from ttrace.capture.parts import Observers, Probes, SessionParts, TracedModel
from ttrace.capture.probes.probe import Visit
from ttrace.errors import CaptureError, TTraceError
from ttrace.layouts.ids import ROOT, Kind, Site, TensorId, make_scores_slot
from ttrace.patches import Patches
from ttrace.trace.format import End


class TracingSession(SessionEvents):
    """A session that traces a model's training steps as a plan says. `ttrace.attach` returns one."""

    def __init__(self, parts: SessionParts) -> None:
        plan = parts.plan
        if plan.role != "reference" and plan.reference is None:
            raise CaptureError(f"a {plan.role} needs the reference's trace: `ttrace trace --reference DIR`.")
        self._plan = plan
        self._adapter = parts.adapter
        self._optimizer = parts.optimizer
        self._given_factor = parts.declared.grad_factor
        self._grad_factor = self._read_factor()
        self._divisor = 1
        self._flags: dict[str, str] = {}
        self.is_closed = self._is_in_step = False
        self._patches = Patches()
        """Everything that `close` removes, the last one first."""
        if plan.deterministic:
            set_deterministic(self._patches)
        try:
            self._begin(parts)
        except BaseException:
            self._patches.remove()
            raise

    def _begin(self, parts: SessionParts) -> None:
        """Make the parts of this session, and attach them to the model, the framework and the optimizer."""
        watch_last_loader(self._patches)
        self._model = TracedModel(parts, self._patches)
        self._clock = self._model.clock
        self._repeated = self._model.names.find_repeated()
        self._probes = Probes(parts, self._model)
        self._observers = Observers(parts, self._model, self._probes, self, self._patches)
        self._patches.on_remove(self._adapter.detach)
        self._adapter.attach(self)
        if self._optimizer is not None:
            state = self._observers.state
            for handle in self._adapter.watch_steps(self._optimizer, state.on_step_begin, state.on_optimizer_step):
                self._patches.on_remove(handle.remove)
        self._model.initial.on_attached()

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
            calls = self._observers.calls if self._plan.inside else nullcontext()
            compiled, split_sums = self._model.compiled.running(), self._probes.split_sums
            with self._clock.running(), patch_torch(self), calls, compiled, split_sums:
                self._model.initial.on_start()
                self._observers.ledger.begin_step()
                self._observers.state.on_start()
                self._observers.stale.on_start()
                yield
                self._probes.tensors.flush()
                if self._optimizer is None:
                    self._observers.state.on_final_gradients()
                self._observers.state.on_end()
                self._grad_factor = self._read_factor()  # a script may set it in each step
                self._flags = read_flags()
        finally:
            self._probes.recorder.flush()
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
            return self._probes.batches.generate(batch)
        if not self._is_in_step and not self.is_closed:
            raise CaptureError(
                "session.batch was called outside of a step, where no data can be generated. Call it inside of "
                "`with session.step():`."
            )
        return batch

    def begin_microbatch(self) -> None:
        """Begin the next microbatch of this rank; without it, each call of the model begins one."""
        self._clock.begin_microbatch()
        self._observers.hooks.begin_microbatch()

    def generate(self, data: dict[str, Any], number: int, *, exact: bool = False) -> dict[str, Any]:
        """Return generated data for this microbatch; with `exact`, integers in the range of the given ones."""
        return self._probes.batches.replace(data, number, exact=exact) if self._clock.is_running else data

    def compare(self, slot: str, data: torch.Tensor, number: int) -> None:
        """Record data that the script uses as it is, to compare it between the two sides."""
        if self._clock.is_running:
            self._probes.batches.compare(slot, data, number)

    def keep(self, batch: Any, number: int) -> None:
        """Record the script's own data of this rank's microbatch of this number."""
        if self._clock.is_running:
            self._probes.batches.keep(batch, number)

    def close(self) -> None:
        """Remove the hooks and complete the trace; a second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            try:
                self._patches.remove()
            except Exception as error:  # an object of another package refused; the trace is complete nevertheless
                self._probes.recorder.add_problem(f"a patch could not be removed: {type(error).__name__}: {error}")
            notes = (
                *self._observers.state.notes,
                *(self._probes.isolate.notes() if self._probes.isolate else ()),
                *self._model.recorded_names.notes(),
            )
            end = End(
                num_steps=self._clock.step,
                grad_factor=self._grad_factor / self._divisor,
                splits={axis: str(split) for axis, split in self._model.resolver.splits.items()},
                batch_axes=self._model.resolver.batch_axes,
                settings=self._observers.state.settings.groups,
                settings_of=self._model.recorded_names.rename_keys(self._observers.state.settings.by_parameter),
                evaluated=self._model.recorded_names.rename_all(self._observers.state.evaluated),
                forward_buffers=self._model.recorded_names.rename_all(self._observers.buffers.changed),
                samples=self._probes.batches.kept,
                replaced=self._probes.batches.replaced,
                initial=self._model.recorded_names.rename_keys(self._model.initial.values),
                stale=self._observers.stale.names,
                num_samples=self._probes.batches.num_samples,
                unloaded=self._model.recorded_names.rename_all(self._observers.state.unloaded),
                random=self._model.recorded_names.rename_all(self._observers.rng_use.modules),
                flags=self._flags,
                notes=(*self._model.resolver.list_unused_rules(), *notes, *self._observers.ledger.notes),
                operations=self._observers.calls.operations,
                sources=environment.fingerprint_sources(),
            )
            self._probes.recorder.close(end)

    # Events of modules

    def on_call(self, name: str, *, again: bool) -> ModuleCall | None:
        """Begin a call of a module that is about to run, or to be recomputed; return None if it is not watched."""
        clock = self._clock
        self._model.initial.on_forward()
        if not clock.is_watched or (again and not clock.is_repeat_clear(name)):
            return None
        if again and self._model.streaming.recomputes:
            return None
        if not self._adapter.is_watched(name, isolated=self._plan.isolated) or self._model.skipped.is_skipped(name):
            return None
        number = 0 if again else clock.count_forward(name, is_repeated=name in self._repeated)
        return ModuleCall(name, clock.step, clock.microbatch, number, again)

    # Events of the framework

    def on_pipeline(self) -> None:
        """Count chunks instead of forwards from now on, because a pipeline is about to run."""
        self._clock.is_pipelined = True
        # Not at the first backward pass: zero-bubble schedules call the engine in ways that nothing observes.
        self._observers.stale.on_backward()

    def on_chunk(self, microbatch: int, *, is_first: bool, is_last: bool) -> AbstractContextManager[None]:
        """Return the context in which a pipeline stage works on one microbatch."""
        return self._clock.in_chunk(PipelineChunk(microbatch, is_first, is_last))

    def on_loss(self, loss: torch.Tensor) -> None:
        """Record the loss, from which backward starts."""
        self._observers.buffers.on_backward()
        self._observers.stale.on_backward()
        number, dispatcher = self._clock.microbatch, self._probes.dispatcher
        dispatcher.visit(Visit(dispatcher.id_of(Site(ROOT, Kind.LOSS), number), loss, None, number))

    def on_auxiliary_loss(self, loss: torch.Tensor) -> None:
        """Record a module's own loss when its gradient arrives, which shows the weight of the loss."""
        call = self._observers.hooks.innermost()
        if call is not None and loss.requires_grad:
            self._probes.tensors.watch_loss(call, loss)

    def on_divide(self, divisor: int) -> None:
        """Remember the number by which the sum of all microbatches' gradients will be divided."""
        self._divisor = divisor

    def on_main_gradients(self, gradients: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Record the sums over this rank's microbatches, before any reduction."""
        self._observers.state.on_main_gradients(gradients)

    # Events of torch functions

    def on_backward(self, roots: tuple[torch.Tensor | GradientEdge, ...]) -> None:
        """Record the loss from which a backward pass starts; in a pipeline, the adapter reports the loss.

        A node of the graph has no value that could be recorded.
        """
        self._observers.buffers.on_backward()
        self._observers.stale.on_backward()
        tensors = [root for root in roots if isinstance(root, torch.Tensor)]
        is_reported = self._clock.is_pipelined or self._adapter.is_in_loss
        if len(tensors) == len(roots) == 1 and tensors[0].numel() == 1 and not is_reported:
            self.on_loss(tensors[0])

    def on_final_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record the final gradients before they are clipped: one wrong gradient would rescale them all."""
        self._observers.state.on_final_gradients(tensors)

    def on_grad_norm(self, norm: torch.Tensor) -> None:
        """Record the norm of all gradients before they are clipped."""
        self._record_scalar(Kind.GRAD_NORM, norm)

    def on_clip(self, factor: torch.Tensor) -> None:
        """Record the factor by which gradients are about to be clipped."""
        self._record_scalar(Kind.CLIP, factor)

    def _record_scalar(self, kind: Kind, value: torch.Tensor) -> None:
        if kind not in self._model.streaming.untraced:
            tensor_id = TensorId.of(self._clock.step, None, ROOT, kind)
            self._probes.dispatcher.visit(Visit(tensor_id, self._adapter.to_full(value)))

    def on_topk(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        """Record this run's choice and its scores, and return the reference's choice if it is known."""
        call = self._observers.hooks.innermost()
        if call is None or not scores.is_floating_point():
            return None
        slot, tensors, dispatcher = str(call.number_of(Kind.DECISION)), self._probes.tensors, self._probes.dispatcher
        reasons_id = tensors.make_id(call, Site(call.name, Kind.DECISION, make_scores_slot(slot)))
        choice_id = tensors.make_id(call, Site(call.name, Kind.DECISION, slot))
        choice = Visit(choice_id, chosen, None, call.microbatch)
        # A recomputed choice is recorded only if it is the first: auxiliary losses choose only if gradients are on.
        dispatcher.visit(Visit(reasons_id, scores, None, call.microbatch))
        dispatcher.visit(choice)
        if self._probes.decisions is None or type(chosen) is not torch.Tensor:
            return None
        return dispatcher.replay(self._probes.decisions, choice)

    def on_collective(self, name: str, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Write a collective to the ledger, and run it."""
        return self._observers.ledger.observe(name, arguments, run)

    def on_wait(self, work: Any) -> None:
        self._observers.ledger.on_wait(work)

    def on_sequence_split(self, mesh: DeviceMesh, size: int, held: torch.Tensor) -> None:
        """Remember how context_parallel splits a sequence."""
        try:
            self._model.resolver.set_split(find_cut(mesh, size, held))
        except TTraceError as error:
            self._probes.recorder.add_problem(str(error))
