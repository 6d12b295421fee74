"""Parts of a session, in three groups: the model, the probes, and the observers.

`TracedModel` names and fills what is traced, `Probes` has everything that a tensor is shown to, and `Observers` notice
tensors. Each group is made from `SessionParts`, which a session is started with, and from the groups before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ttrace.adapters.adapter import Adapter, Optimizer, find_rank_and_world
from ttrace.adapters.native.adapter import MeshLike
from ttrace.capture import environment
from ttrace.capture.observe.compiled import Compiled
from ttrace.capture.observe.events import SessionEvents, StepCounter
from ttrace.capture.observe.function_calls import FunctionCalls
from ttrace.capture.observe.hooks import Hooks
from ttrace.capture.observe.ledger import Ledger
from ttrace.capture.observe.rng_use import RngUse
from ttrace.capture.plan import Plan
from ttrace.capture.probes.dispatch import Dispatcher, ForwardTensors, ModuleTensors
from ttrace.capture.probes.generator import Batches, Generator
from ttrace.capture.probes.isolation import Decisions, Isolate
from ttrace.capture.probes.probe import Probe
from ttrace.capture.probes.recorder import Detail, Recorder, open_writer
from ttrace.capture.probes.twins import Perturb, SplitSums
from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.capture.resolve.names import Names, PortNames, list_modules, make_port, switch_dropout_off
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.capture.state.gradients import StaleGradients, Streaming
from ttrace.capture.state.initial_values import InitialState
from ttrace.capture.state.model_state import Buffers, HeldTensors, ModelState
from ttrace.errors import CaptureError
from ttrace.large_references.blocks import SkippedBlocks
from ttrace.layouts.placement import Placement
from ttrace.layouts.rules import Rules
from ttrace.patches import Patches
from ttrace.trace.format import Attachment, Manifest


@dataclass(frozen=True)
class Declarations:
    """What a script tells `attach` about its parallelism."""

    mesh: MeshLike | None = None
    rules: Rules = field(default_factory=Rules)
    mb_axis_size: int = 1
    grad_factor: float | None = None
    adapter: type[Adapter] | Adapter | None = None

    def or_planned(self, plan: Plan) -> Declarations:
        """Take the mesh and the rules of the command line, where the script declares none; refuse rules of both."""
        mesh, rules = self.mesh, self.rules
        if mesh is None and plan.mesh:
            is_alone = find_rank_and_world()[1] == 1  # the reference has the same axes, with one rank along each
            mesh = re.sub(r"\d+", "1", plan.mesh) if is_alone else plan.mesh
        if rules.rules and plan.rules:
            raise CaptureError(
                "the script states rules (ttrace.attach(rules=...)), and so does the command line (--rules), but only "
                "one list of rules is used. Leave one of them out."
            )
        if plan.rules:
            rules = Rules.of(plan.rules, origin="--rules")
        return replace(self, mesh=mesh, rules=rules)


@dataclass(frozen=True)
class SessionParts:
    """What a session is started with."""

    plan: Plan
    model: nn.Module | Sequence[nn.Module]
    optimizer: Optimizer | None
    adapter: Adapter
    declared: Declarations = field(default_factory=Declarations)
    attachment: Attachment | None = None
    """What automatic attachment found."""

    @property
    def chunks(self) -> list[nn.Module]:
        return [self.model] if isinstance(self.model, nn.Module) else list(self.model)


class TracedModel:
    """The model, ready to be traced: its names, its layouts, and its generated values."""

    def __init__(self, parts: SessionParts, patches: Patches) -> None:
        """Find the names and layouts of the model, and replace its parameters' values."""
        plan, adapter = parts.plan, parts.adapter
        self.clock = StepCounter(plan.first_step)
        self.reference = ReferenceTrace(plan.trusted)
        self.port = make_port(plan, parts.chunks, adapter.name, self.reference)
        self.recorded_names = PortNames(self.port)
        """The names in the trace: in a port, those of the candidate."""
        rules, mb_axis_size = parts.declared.rules, parts.declared.mb_axis_size
        self.resolver = LayoutResolver(adapter, rules, self.reference, mb_axis_size, self.port)
        self.names = names = Names(parts.chunks, adapter.name)
        tables = names.list_table_lengths()
        class_counts = parts.attachment.class_counts if parts.attachment is not None else ()
        self.generator = Generator(plan, adapter, self.resolver, self.reference, tables, self.port, class_counts)
        self.parameters, self.aliases = names.parameters(self.reference.aliases)
        replaced = self.parameters if _replaces_initial_values(parts) else {}
        self.initial = InitialState(
            replaced, adapter, is_reference=plan.role == "reference", was_trained=parts.attachment is not None
        )
        self.generated = self.generator.fill_parameters(self.parameters)
        if plan.parameters != "own":
            adapter.on_parameters_replaced(parts.optimizer)
        self.streaming = Streaming.of(self.parameters.values())
        # A reference that is larger than memory takes long, and isolation needs only the accused modules of it.
        has_skipped = plan.role != "candidate" and plan.isolated and plan.inside and self.streaming.num_streamed
        self.skipped = SkippedBlocks(dict(names.modules()) if has_skipped else {}, plan.inside)
        patches.on_remove(self.skipped.remove)
        # Reference and twins must be traced in full, because tolerances come from them.
        self.compiled = Compiled(names, runs_eagerly=plan.role != "candidate" or plan.compiled == "eager")
        patches.on_remove(self.compiled.remove)
        self.modules = list_modules(names)
        """Every module, as it was before dropout is switched off."""
        self.dropout = switch_dropout_off(names, patches)
        """The modules whose dropout is switched off."""

    @property
    def placements(self) -> dict[str, Placement]:
        return {name: each.placement for name, each in self.generated.items()}


class Probes:
    """The probes of a session, the dispatcher that shows tensors to them, and what makes visits of tensors."""

    def __init__(self, parts: SessionParts, model: TracedModel) -> None:
        plan, adapter, reference, resolver = parts.plan, parts.adapter, model.reference, model.resolver
        held = (adapter.to_local(parameter) for parameter in model.parameters.values())
        detail = Detail(plan, reference, held, adapter.mesh.num_ranks)
        self.recorder = Recorder(open_writer(plan, _make_manifest(parts, model)), plan, detail, adapter.to_local)
        for problem in adapter.find_disagreements(model.placements):
            self.recorder.add_problem(problem)
        replays = plan.decisions == "replayed" and plan.role != "reference"
        self.decisions = Decisions(resolver, reference) if replays else None
        """The reference's choices, in a run that repeats them."""
        self.isolate = Isolate(plan, adapter, resolver, reference) if plan.isolated else None
        nudge: Perturb | None = None
        if plan.role == "twin":
            has_embeddings = bool(model.generator.tables)
            nudge = Perturb(plan.twin, plan.seed, adapter, isolated=plan.isolated, has_embeddings=has_embeddings)
        self.split_sums: AbstractContextManager[Any] = nullcontext()
        """What a twin enters around each step."""
        if plan.role == "twin":
            self.split_sums = SplitSums(plan.twin, plan.seed)
        # A tensor is recorded before isolation replaces it; outside of isolation, a twin's nudge is recorded with it.
        chain = (self.recorder, self.isolate, nudge) if plan.isolated else (nudge, self.recorder)
        probes: tuple[Probe, ...] = tuple(probe for probe in chain if probe is not None)
        dispatcher = Dispatcher(model.clock, resolver, self.recorder, probes, model.port, infers=detail.may_sketch)
        self.dispatcher = dispatcher
        observer = ForwardTensors if plan.forward_only else ModuleTensors
        self.tensors: ModuleTensors = observer(
            adapter, model.clock, resolver, reference, dispatcher, self.recorder, isolate=self.isolate, nudge=nudge
        )
        self.batches = Batches(model.clock, resolver, model.generator, dispatcher)


class Observers:
    """What notices tensors, collectives, random numbers, and the model's state."""

    def __init__(
        self, parts: SessionParts, model: TracedModel, probes: Probes, events: SessionEvents, patches: Patches
    ) -> None:
        """Set the hooks, which report to `events` and to the probes."""
        plan, adapter, clock, watched = parts.plan, parts.adapter, model.clock, model.compiled.watched
        self.hooks = Hooks(watched, events, probes.tensors.visit, without_gradients=plan.forward_only)
        patches.on_remove(self.hooks.remove)
        operations, show_result = model.reference.operations, probes.tensors.show_result
        self.calls = FunctionCalls(plan.inside, model.parameters, operations, self.hooks, clock, show_result)
        probes.tensors.pause = self.calls.pause
        self.ledger = Ledger(plan, adapter, clock, watched, probes.recorder.write_collective, self.calls)
        patches.on_remove(self.ledger.remove)
        self.rng_use = RngUse(watched, lambda: clock.is_watched)
        patches.on_remove(self.rng_use.remove)
        self.buffers = Buffers(model.names.buffers, is_reference=plan.role == "reference")
        tensors = HeldTensors(model.parameters, self.buffers, model.generated, dict(model.names.modules()))
        add_problem = probes.recorder.add_problem
        self.state = ModelState(
            plan, adapter, parts.optimizer, tensors, probes.dispatcher, clock, probes.isolate, add_problem
        )
        self.stale = StaleGradients(model.parameters, adapter, drops_untraced=parts.attachment is not None)
        patches.on_remove(self.state.remove)


def _replaces_initial_values(parts: SessionParts) -> bool:
    """Whether generated values replace those that the script trains: not those of an earlier session or step.

    The parts of a port are not those of the other side, so nothing is compared there.
    """
    plan = parts.plan
    is_first = plan.role in ("reference", "candidate") and not plan.isolated and plan.repeats is None
    # After steps that nothing watched, replicas may differ by rounding.
    optimizers = parts.adapter.find_torch_optimizers(parts.optimizer)
    has_stepped = parts.attachment is None and any(getattr(each, "state", None) for each in optimizers)
    return is_first and plan.parameters == "generated" and plan.port is None and not has_stepped


def _make_manifest(parts: SessionParts, model: TracedModel) -> Manifest:
    plan, adapter, names = parts.plan, parts.adapter, model.recorded_names
    return Manifest(
        role=plan.role,
        rank=adapter.coord.rank,
        num_ranks=adapter.mesh.num_ranks,
        mesh=str(adapter.mesh),
        seed=plan.seed,
        launch=plan.launch,
        num_microbatches=parts.declared.mb_axis_size,
        first_step=plan.first_step,
        isolated=plan.isolated,
        modules=names.rename_keys(model.modules),
        parameters=names.rename_keys({name: each.requires_grad for name, each in model.parameters.items()}),
        aliases={names.rename(alias): names.rename(name) for alias, name in model.aliases.items()},
        padding=names.find_padding(model.placements),
        opaque=names.rename_all(model.compiled.opaque),
        passed=model.skipped.blocks,
        divided=names.rename_all(adapter.divided),
        untraced=(*adapter.untraced, *model.streaming.untraced),
        reduced=tuple(sorted(adapter.reduced_axes)),
        dropout=names.rename_all(model.dropout),
        notes=(*model.compiled.notes(), *adapter.notes, *model.streaming.notes),
        attachment=parts.attachment,
        versions=environment.read_versions(),
        environment=environment.read_environment(),
    )
