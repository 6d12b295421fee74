"""Monitor of a run: every few steps it compares what must be equal between ranks, and reports what differs.

Each rank computes fingerprints of its tensors and sends a few numbers (`RankReport`). Only if these differ, the ranks
exchange more, to find the tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ttrace.adapters.adapter import ANONYMOUS_AXIS, Adapter, FrameworkEvents, Optimizer
from ttrace.adapters.registry import make_adapter
from ttrace.capture.parts import Declarations, SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.process import wait_for_gloo_at_exit
from ttrace.capture.session import TracingSession
from ttrace.capture.start import choose_adapter
from ttrace.errors import CaptureError, DisagreementError
from ttrace.layouts.ids import Kind
from ttrace.layouts.rules import Rules
from ttrace.monitor.disagreement import (
    DataWatch,
    Disagreement,
    OnDisagreement,
    Trouble,
    describe_difference,
    write_evidence,
)
from ttrace.monitor.exchange import (
    AxisSummary,
    RankReport,
    choose_device,
    find_equal,
    gather_objects,
    gather_reports,
    list_groups,
    split,
)
from ttrace.monitor.replicas import HeldReplica, Replicas, combine, make_fingerprint, read_fingerprints
from ttrace.monitor.schedule import TraceSchedule
from ttrace.notebook import make_table

_LOG = logging.getLogger("ttrace.watch")
_OWN_DATA_AXES = ("pp", "cp")
"""Axes, besides the adapter's data axes, along which the inputs of the model differ."""
_NUM_SHOWN = 4
"""How many disagreements of a check are shown, and how many tensors are compared in detail and written to files."""


def start_monitor(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    declared: Declarations,
    *,
    every: int,
    on_disagreement: Literal["warn", "raise"] | OnDisagreement,
    out: Path,
    trace: TraceSchedule | None,
) -> Monitor:
    """Choose the adapter, and start a monitor of the model."""
    if every < 1:
        raise CaptureError(f"watch(every={every}): `every` must be at least 1.")
    _, watched_optimizer, adapter = choose_adapter(model, optimizer, declared)
    if ANONYMOUS_AXIS in adapter.mesh.sizes:
        raise CaptureError(
            "watch cannot tell what the ranks of this job share: the model is not wrapped by DDP or FSDP2, and does "
            'not consist of DTensors. Pass watch(mesh=...), for example {"dp": 8} if each rank has its own data.'
        )
    wait_for_gloo_at_exit()
    return Monitor(
        adapter, watched_optimizer, declared.rules, every=every, on_disagreement=on_disagreement, out=out, trace=trace
    )


class Monitor:
    """Monitor of one training, made by `ttrace.watch`. Every rank has one, and all find the same."""

    def __init__(
        self,
        adapter: Adapter,
        optimizer: Optimizer | None,
        rules: Rules,
        *,
        every: int,
        on_disagreement: Literal["warn", "raise"] | OnDisagreement,
        out: Path,
        trace: TraceSchedule | None,
    ) -> None:
        self._adapter = adapter
        self._every = every
        self._on_disagreement = on_disagreement
        self._out = out
        self._optimizer = optimizer
        self._rules = rules
        self._replicas = Replicas(adapter, optimizer, rules)
        self._device = choose_device(self._replicas.parameters.values())
        mesh = adapter.mesh
        self._axes = [axis for axis, size in mesh.sizes.items() if size > 1]
        self._groups = {axis: list_groups(mesh, [axis]) for axis in self._axes}
        first = [axis for axis, size in mesh.factorisations[0] if size > 1]
        self._same_data_axes = [axis for axis in first if axis not in (*adapter.data_axes, *_OWN_DATA_AXES)]
        self._data_groups = list_groups(mesh, adapter.data_axes) if adapter.data_axes else []
        self._data = DataWatch()
        self.step = 0
        """The number of complete optimizer updates."""
        self._num_calls = 0
        """How often the optimizer's step was called."""
        self._has_stepped = False
        self._known: set[tuple[Trouble, str]] = set()
        """Disagreements that the last check found: they are not reported again while they persist."""
        self._last_prints: dict[str, int] = {}
        """The fingerprints of the last check."""
        self._random_state = 0
        """The fingerprint of the random state in the last check."""
        self.disagreements: list[Disagreement] = []
        """All disagreements so far; the same on all ranks."""
        self.num_checks = 0
        self._traces = ScheduledTraces(trace, out, self._start_trace) if trace is not None else None
        self._handles: list[Any] = [
            chunk.register_forward_pre_hook(self._on_call, prepend=True, with_kwargs=True) for chunk in adapter.chunks
        ]
        adapter.attach(FrameworkEvents())  # some count steps only then
        if optimizer is not None:
            self._handles += adapter.watch_steps(optimizer, self._on_step, self._on_step_end)
        if self._replicas.unknown and adapter.rank == 0:
            names = ", ".join(self._replicas.unknown[:3])
            _LOG.warning(
                "ttrace.watch does not know the layouts of %d parameters (%s, ...), so it compares them along data "
                "axes only. State their layouts with rules=.",
                len(self._replicas.unknown),
                names,
            )

    def close(self) -> None:
        """Stop watching, and remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._adapter.detach()
        if self._traces is not None:
            self._attempt(self._traces.close)

    def _repr_html_(self) -> str:
        """Show all disagreements in a notebook."""
        num = len(self.disagreements)
        title = f"{'✗' if num else '✓'} step {self.step}: {num} disagreements in {self.num_checks} checks"
        rows = [
            (each.step, each.trouble.value, each.site, " ".join(map(str, each.ranks)), each.axis, each.detail)
            for each in self.disagreements
        ]
        return make_table(title, ("step", "trouble", "where", "ranks", "axis", "detail"), rows)

    def _on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count steps, and collect the data of every call."""
        if not (module.training and torch.is_grad_enabled()):
            return
        if self._has_stepped:
            self._has_stepped = False
            self.step += 1
        if module is not self._adapter.chunks[0]:
            return
        if self._traces is not None:
            self._attempt(self._traces.on_call)
        self._data.on_call(self.step, args, kwargs)

    def _on_step(self, _: Any = None) -> None:
        """Check before the optimizer's first step in an iteration: gradients are final, parameters unchanged."""
        self._num_calls += 1
        if not self._has_stepped and self.step % self._every == 0:
            self.check()
        self._has_stepped = True

    def _on_step_end(self) -> None:
        if self._traces is not None:
            self._attempt(self._traces.on_step_end)

    def _attempt(self, act: Callable[[int], None]) -> None:
        """Trace according to the schedule. After a failure, stop tracing and let the training continue."""
        try:
            act(self.step)
        except Exception as error:
            self._traces = None
            _LOG.error("ttrace.watch traces nothing from step %d on: %s", self.step, error)

    def _start_trace(self, plan: Any) -> TracingSession:
        adapter = make_adapter(type(self._adapter), self._adapter.chunks, self._optimizer, self._adapter.mesh)
        return TracingSession(
            SessionParts(plan, adapter.chunks, self._optimizer, adapter, Declarations(rules=self._rules))
        )

    # One check

    def check(self) -> list[Disagreement]:
        """Compare everything now, and return new disagreements. All ranks must call it in the same step."""
        try:
            held = list(self._replicas.collect())
            prints = self._measure(held)
        except Exception as error:  # the training must continue, and other ranks must not wait
            gather_reports(RankReport((AxisSummary(),) * len(self._axes)), self._device)
            self._switch_off(f"it cannot read the model: {type(error).__name__}: {error}")
            return []
        self.num_checks += 1
        data, repeated = self._data.read()
        last_state, self._random_state = self._random_state, self._read_random_state()
        has_drawn = last_state not in (0, self._random_state)
        local = [*self._find_frozen(held, prints), *(("data", Trouble.REPEATED_DATA) for _ in repeated[:1])]
        tables = {axis: self._choose(held, prints, axis) for axis in self._axes}
        report = RankReport(
            axes=tuple(_summarise(tables[axis]) for axis in self._axes),
            data=data,
            random_state=self._random_state if has_drawn else 0,
            num_steps=self._num_calls,
            num_local=len(local),
            is_readable=1,
        )
        reports = gather_reports(report, self._device)
        unreadable = [rank for rank, each in enumerate(reports) if not each.is_readable]
        if unreadable:
            self._switch_off(f"ranks {unreadable} cannot read their model")
            return []
        disagreements = list(self._compare(reports, tables, local))
        self._last_prints = prints
        return self._report(disagreements, {each.site: each.tensor for each in held})

    def _switch_off(self, why: str) -> None:
        """Stop watching and let the training continue: an error of the monitor must not end it."""
        self.close()
        _LOG.error("ttrace.watch is off from step %d on: %s", self.step, why)

    def _measure(self, held: Sequence[HeldReplica]) -> dict[str, int]:
        with torch.no_grad():
            values = read_fingerprints([make_fingerprint(each.tensor) for each in held])
        return {each.site: value for each, value in zip(held, values, strict=True)}

    def _choose(self, held: Iterable[HeldReplica], prints: Mapping[str, int], axis: str) -> dict[str, int]:
        """Choose what must be equal along an axis. A buffer that changes may have statistics of a rank's own data."""
        chosen = {}
        for each in held:
            is_own = each.kind is Kind.BUFFER and axis in self._adapter.data_axes
            if axis in each.axes and not (is_own and self._last_prints.get(each.site) != prints[each.site]):
                chosen[each.site] = prints[each.site]
        return chosen

    def _read_random_state(self) -> int:
        state = make_fingerprint(torch.get_rng_state())
        return int(read_fingerprints([state])[0])

    def _find_frozen(self, held: Iterable[HeldReplica], prints: Mapping[str, int]) -> Iterator[tuple[str, Trouble]]:
        """Find trained parameters that have a nonzero gradient but did not change since the last check."""
        unchanged = [
            each.site.rpartition("/")[0]
            for each in held
            if each.kind is Kind.PARAM and each.tensor.numel() and self._last_prints.get(each.site) == prints[each.site]
        ]
        if not unchanged or self.num_checks == 1:
            return
        trained = {name: self._replicas.parameters[name] for name in unchanged}
        groups = self._adapter.find_groups(self._optimizer, trained.values()) if self._optimizer is not None else ()
        zero_rate = {id(parameter) for parameter, group in groups if not group.get("lr", 1.0)}
        for name, parameter in trained.items():
            gradient = self._adapter.read_gradient(parameter)
            if gradient is None or not parameter.requires_grad or id(parameter) in zero_rate:
                continue
            if bool(self._adapter.to_local(gradient.tensor).any()):
                yield f"{name}/{Kind.PARAM}", Trouble.FROZEN

    def _compare(
        self,
        reports: Sequence[RankReport],
        tables: Mapping[str, Mapping[str, int]],
        local: Sequence[tuple[str, Trouble]],
    ) -> Iterator[Disagreement]:
        """Compare the reports, with the same result on every rank. Likely causes of other disagreements come first."""
        division = split({rank: report.num_steps for rank, report in enumerate(reports)})
        if division is not None:
            counts = ", ".join(f"rank {rank} {reports[rank].num_steps}" for rank in division.wrong[:4])
            yield Disagreement(
                Trouble.STEP_COUNT, self.step, "steps", division.wrong, division.majority, detail=f"steps: {counts}"
            )
        for group in self._data_groups:
            for ranks in find_equal({rank: reports[rank].data for rank in group if reports[rank].data}):
                axis = " ".join(self._adapter.data_axes)
                yield Disagreement(Trouble.SAME_DATA, self.step, "data", ranks, axis=axis)
        for axis in self._same_data_axes:
            yield from self._find_different(axis, Trouble.OTHER_DATA, "data", [each.data for each in reports])
            random_states = [each.random_state for each in reports]
            yield from self._find_different(axis, Trouble.RANDOM_STATE, "random state", random_states)
        suspects = [
            axis
            for number, axis in enumerate(self._axes)
            if any(_differ([reports[rank].axes[number] for rank in group]) for group in self._groups[axis])
        ]
        if suspects:
            everyones = gather_objects({axis: dict(tables[axis]) for axis in suspects})
            for axis in suspects:
                yield from self._find_sites(axis, [each[axis] for each in everyones])
        if any(each.num_local for each in reports):
            yield from self._find_local(gather_objects(list(local)))

    def _find_sites(self, axis: str, everyones: Sequence[Mapping[str, int]]) -> Iterator[Disagreement]:
        for group in self._groups[axis]:
            sites = dict.fromkeys(site for rank in group for site in everyones[rank])
            is_sharded = len({frozenset(filter(_is_state, everyones[rank])) for rank in group}) > 1
            for site in sites:
                if is_sharded and _is_state(site):
                    continue
                division = split({rank: everyones[rank].get(site) for rank in group})
                if division is not None:
                    yield Disagreement(
                        Trouble.REPLICAS_DIFFER, self.step, site, division.wrong, division.majority, axis=axis
                    )

    def _find_different(self, axis: str, trouble: Trouble, site: str, numbers: Sequence[int]) -> Iterator[Disagreement]:
        for group in self._groups[axis]:
            division = split({rank: numbers[rank] for rank in group})
            if division is not None:
                yield Disagreement(trouble, self.step, site, division.wrong, division.majority, axis=axis)

    def _find_local(self, everyones: Sequence[Sequence[tuple[str, Trouble]]]) -> Iterator[Disagreement]:
        ranks: dict[tuple[str, Trouble], list[int]] = {}
        for rank, problems in enumerate(everyones):
            for problem in problems:
                ranks.setdefault(problem, []).append(rank)
        for (site, trouble), where in ranks.items():
            yield Disagreement(trouble, self.step, site, tuple(where))

    def _report(self, current: Sequence[Disagreement], tensors: Mapping[str, torch.Tensor]) -> list[Disagreement]:
        """Report new disagreements. A known one is reported again only after it has been resolved in between."""
        keys = {(each.trouble, each.site) for each in current}
        new = [each for each in current if (each.trouble, each.site) not in self._known]
        self._known = keys
        described = []
        for number, each in enumerate(new):
            if each.trouble is Trouble.REPLICAS_DIFFER and number < _NUM_SHOWN:
                each = describe_difference(each, tensors.get(each.site), self._adapter.rank)
                each = write_evidence(each, tensors.get(each.site), self._adapter.rank, self._out)
            described.append(each)
        self.disagreements += described
        if callable(self._on_disagreement):
            for each in described:
                self._on_disagreement(each)
        elif described and self._on_disagreement == "raise":
            raise DisagreementError(_join(described))
        elif described and self._adapter.rank == 0:
            _LOG.warning("ttrace.watch: %s", _join(described))
        return described


class ScheduledTraces:
    """Full traces in the middle of a run, according to a schedule. The script continues after each of them."""

    def __init__(self, schedule: TraceSchedule, out: Path, start: Callable[[Plan], TracingSession]) -> None:
        self._schedule = schedule
        self._out = out
        self._start = start
        self._session: TracingSession | None = None
        self._step = -1
        self._open = ExitStack()

    def on_step_end(self, step: int) -> None:
        """Start a trace that begins with the next step. It is started here because no module is running."""
        if self._session is None and self._schedule.is_start(step + 1):
            plan = Plan(
                out=self._out / f"step-{step + 1}", parameters="own", num_steps=self._schedule.active, stop=False
            )
            self._session = self._start(plan)

    def on_call(self, step: int) -> None:
        """In the first call of a step, end the previous step in the trace, and begin this one if it is traced."""
        if step == self._step:
            return
        self._step = step
        self._open.close()
        if self._session is not None and self._session.is_closed:
            self._session = None
        if self._session is not None:
            self._open.enter_context(self._session.step())

    def close(self, _: int) -> None:
        """Close an open trace, even if its steps are not complete."""
        self._open.close()
        if self._session is not None and not self._session.is_closed:
            self._session.close()


def _summarise(table: Mapping[str, int]) -> AxisSummary:
    states = {site: value for site, value in table.items() if _is_state(site)}
    others = {site: value for site, value in table.items() if site not in states}
    return AxisSummary(combine(others.items()), combine(states.items()), combine((site, 1) for site in states))


def _differ(summaries: Sequence[AxisSummary]) -> bool:
    tensors, states, state_sites = map(set, zip(*summaries, strict=True))
    return len(tensors) > 1 or (len(state_sites) == 1 and len(states) > 1)


def _is_state(site: str) -> bool:
    return site.rpartition("/")[2].startswith(f"{Kind.OPTIM}.")


def _join(disagreements: Sequence[Disagreement]) -> str:
    num_more = len(disagreements) - _NUM_SHOWN
    more = f"\n... and {num_more} more" if num_more > 0 else ""
    return "\n".join(map(str, disagreements[:_NUM_SHOWN])) + more
