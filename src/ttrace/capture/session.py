"""This module is the session: it counts steps and microbatches, and passes every tensor down the chain of probes."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ttrace.adapters.adapter import Adapter
from ttrace.capture import backward, names
from ttrace.capture.census import census, switch_dropout_off
from ttrace.capture.generator import Generator
from ttrace.capture.hooks import Call, Hooks, slot_of
from ttrace.capture.placing import Placing, Reference
from ttrace.capture.plan import Plan
from ttrace.capture.probe import Probe, Visit, passed_down
from ttrace.capture.recorder import Recorder
from ttrace.capture.rewriter import Perturb
from ttrace.errors import CaptureError, TTraceError
from ttrace.layouts.placed import Placed
from ttrace.layouts.rules import Rules
from ttrace.tensors.ids import ROOT, Kind, Site, TensorId
from ttrace.trace.format import Manifest
from ttrace.trace.writer import Writer
from ttrace.values.generate import Distribution

DATA_AXIS = "dp"
"""The axis along which ranks run microbatches of their own, unless a rule says that it cuts a tensor."""


class Session:
    """Traces a model's training steps as a plan says. `ttrace.attach` makes one."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        adapter: Adapter,
        rules: Rules,
        *,
        num_microbatches: int = 1,
        grad_factor: float = 1.0,
    ) -> None:
        if plan.role != "reference" and plan.reference is None:
            raise CaptureError(f"a {plan.role} needs the reference's trace: `ttrace trace --reference DIR`.")
        reference = Reference(plan.reference)
        self._plan = plan
        self._adapter = adapter
        self._placing = Placing(adapter, rules, reference, num_microbatches)
        self._generator = Generator(plan, adapter, self._placing, reference)
        self._parameters, aliases = names.parameters(model)
        self._made = {name: self._generator.fill_parameter(name, p) for name, p in self._parameters.items()}
        manifest = Manifest(
            role=plan.role,
            rank=adapter.coord.rank,
            num_ranks=adapter.mesh.num_ranks,
            mesh=str(adapter.mesh),
            seed=plan.seed,
            num_microbatches=num_microbatches,
            grad_factor=grad_factor,
            modules=census(model),
            parameters={name: parameter.requires_grad for name, parameter in self._parameters.items()},
            aliases=aliases,
            notes=tuple(switch_dropout_off(model)),
            versions={"python": platform.python_version(), "torch": torch.__version__},
        )
        self._recorder = Recorder(Writer(plan.out, manifest), plan, adapter.local)
        nudge: tuple[Probe, ...] = (Perturb(plan.twin, plan.seed),) if plan.role == "twin" else ()
        self._probes: tuple[Probe, ...] = (*nudge, self._recorder)
        self._step = 0
        self._active = False
        self._microbatch = -1
        self._num_batches = 0
        self._num_calls: Counter[str] = Counter()
        self._hooks = Hooks(model, self)
        self._optimizer = optimizer
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: self._see_gradients())
            optimizer.register_step_post_hook(lambda *_: self._see_parameters(Kind.PARAM_AFTER))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one optimizer update. After the plan's last step the trace is closed and the script ends."""
        if self._step >= self._plan.num_steps:
            yield
            return
        self._microbatch, self._num_batches = -1, 0
        self._active = True
        self._see_parameters(Kind.PARAM)
        try:
            with backward.heard(self._see_loss):
                yield
            if self._optimizer is None:
                self._see_gradients()
        finally:
            self._active = False
        self._step += 1
        if self._step == self._plan.num_steps:
            self.close()
            if self._plan.stop:
                sys.exit(0)

    def batch(self, batch: Any) -> Any:
        """This rank's part of generated data with the batch's own shapes, ranges and dtypes."""
        if not self._active:
            return batch
        number = self._num_batches
        self._num_batches += 1
        paths, structure = pytree.tree_flatten_with_path(batch)
        leaves = []
        for path, leaf in paths:
            if isinstance(leaf, torch.Tensor):
                tensor_id = self._id(Site(ROOT, Kind.BATCH, slot_of(path)), number)
                leaf, made = self._generator.batch_leaf(tensor_id, leaf, number)
                self._visit(tensor_id, leaf, number, values=made.distribution, fallback=made.placed)
            leaves.append(leaf)
        return pytree.tree_unflatten(leaves, structure)

    def close(self) -> None:
        """Remove the hooks and complete the trace."""
        self._hooks.remove()
        self._recorder.close(num_steps=self._step)

    def enters(self, name: str) -> Call | None:
        """Hooks: a module is about to run."""
        if not self._active or not torch.is_grad_enabled():
            return None
        if name == ROOT:
            self._microbatch += 1
            self._num_calls.clear()
        number = self._num_calls[name]
        self._num_calls[name] += 1
        return Call(name, self._step, max(self._microbatch, 0), number)

    def sees(self, call: Call, kind: Kind, slot: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Hooks: a tensor of this call is there."""
        tensor_id = self._id(Site(call.name, kind, slot), call.microbatch, step=call.step, call=call.number)
        return self._visit(tensor_id, tensor, call.microbatch, entry=call.is_entry(kind))

    def _see_loss(self, tensors: tuple[torch.Tensor, ...]) -> None:
        number = max(self._microbatch, 0)
        for i, tensor in enumerate(tensors):
            if tensor.numel() == 1:
                self._visit(self._id(Site(ROOT, Kind.LOSS, str(i) if i else ""), number), tensor, number)

    def _see_parameters(self, kind: Kind) -> None:
        if self._active:
            for name, parameter in self._parameters.items():
                made = self._made[name]
                source = made.distribution if kind is Kind.PARAM else None
                tensor_id = TensorId.of(self._step, None, name, kind)
                self._visit(tensor_id, parameter.detach(), values=source, fallback=made.placed)

    def _see_gradients(self) -> None:
        if self._active:
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    tensor_id = TensorId.of(self._step, None, name, Kind.PARAM_GRAD)
                    self._visit(tensor_id, parameter.grad, fallback=self._made[name].placed)

    def _visit(
        self,
        tensor_id: TensorId,
        tensor: torch.Tensor,
        microbatch: int = 0,
        *,
        entry: bool = False,
        values: Distribution | None = None,
        fallback: Placed | None = None,
    ) -> torch.Tensor | None:
        try:
            placed = self._placing.placed(tensor_id, tensor, microbatch) or fallback
        except TTraceError as error:
            self._recorder.keep(str(error))
            placed = None
        return passed_down(self._probes, Visit(tensor_id, tensor, placed, microbatch, entry, values))

    def _id(self, site: Site, number: int, *, step: int | None = None, call: int = 0) -> TensorId:
        """The id of a site in this rank's microbatch; microbatches that are parts of one tensor share an id."""
        microbatch = None if self._placing.runs_together(site) else self._global_microbatch(number)
        return TensorId(self._step if step is None else step, microbatch, site, call)

    def _global_microbatch(self, number: int) -> int:
        """Accumulation index x dp + dp rank, where ranks along dp run microbatches of their own."""
        if DATA_AXIS not in self._adapter.mesh.sizes or self._placing.cuts(DATA_AXIS):
            return number
        return number * self._adapter.mesh.sizes[DATA_AXIS] + self._adapter.coord[DATA_AXIS]
