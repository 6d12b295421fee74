"""Monitor of a run: every few steps it compares what must be equal between ranks, and says what is not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ttrace.adapters.adapter import ANONYMOUS_AXIS, Adapter, Optimizer
from ttrace.adapters.events import FrameworkEvents
from ttrace.adapters.registry import make_adapter
from ttrace.capture.process import wait_for_gloo_at_exit
from ttrace.capture.session import TracingSession
from ttrace.capture.start import Declarations, choose_adapter
from ttrace.errors import CaptureError, DisagreementError
from ttrace.layouts.ids import Kind
from ttrace.layouts.rules import Rules
from ttrace.monitor.data_watch import DataWatch
from ttrace.monitor.disagreement import Disagreement, OnDisagreement, Trouble
from ttrace.monitor.evidence import describe_difference, keep_evidence
from ttrace.monitor.exchange import choose_device, find_equal, gather, gather_objects, list_groups, split
from ttrace.monitor.fingerprint import combine, make_fingerprint, read_fingerprints
from ttrace.monitor.replicas import HeldReplica, Replicas
from ttrace.monitor.schedule import ScheduledTraces
from ttrace.monitor.trace_schedule import TraceSchedule
from ttrace.notebook import make_table

_LOG = logging.getLogger("ttrace.watch")
_NOT_ALIKE = ("pp", "cp")
"""Axes of a model along which data are not the same on all ranks."""
_PER_AXIS = 3
"""How many numbers each rank tells for each axis."""
_NUM_SHOWN = 4
"""Of so many tensors in a check the values are compared and kept; of others only the names are told."""


class Monitor:
    """What watches one training. `ttrace.watch` makes it."""

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
        self._alike = [axis for axis in first if axis not in (*adapter.data_axes, *_NOT_ALIKE)]
        self._apart = list_groups(mesh, adapter.data_axes) if adapter.data_axes else []
        self._data = DataWatch()
        self.step = 0
        """The number of optimizer updates that are complete."""
        self._num_calls = 0
        """How often the optimizer's step was called."""
        self._has_stepped = False
        self._known: set[tuple[Trouble, str]] = set()
        """What was told, and was not right again since."""
        self._before: dict[str, int] = {}
        """The fingerprints of the last check."""
        self._random = 0
        self.disagreements: list[Disagreement] = []
        """Everything that was found so far, on all ranks."""
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
                "ttrace.watch does not know how %d parameters are cut (%s, ...): they are compared along the axes of "
                "data only. State their layouts with rules=.",
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
        """Show what was found so far in a notebook."""
        num = len(self.disagreements)
        title = f"{'✗' if num else '✓'} step {self.step}: {num} disagreements in {self.num_checks} checks"
        rows = [
            (each.step, each.trouble.value, each.site, " ".join(map(str, each.ranks)), each.axis, each.detail)
            for each in self.disagreements
        ]
        return make_table(title, ("step", "trouble", "where", "ranks", "axis", "detail"), rows)

    def _on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notice the first call of a step, and the data of every call."""
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
        """Check before the optimizer's first step in an iteration: gradients are final, parameters those in use."""
        self._num_calls += 1
        if not self._has_stepped and self.step % self._every == 0:
            self.check()
        self._has_stepped = True

    def _on_step_end(self) -> None:
        if self._traces is not None:
            self._attempt(self._traces.on_step_end)

    def _attempt(self, act: Callable[[int], None]) -> None:
        """Trace as the schedule says; if that fails, trace no more, and let the training go on."""
        try:
            act(self.step)
        except Exception as error:
            self._traces = None
            _LOG.error("ttrace.watch traces nothing from step %d on: %s", self.step, error)

    def _start_trace(self, plan: Any) -> TracingSession:
        adapter = make_adapter(type(self._adapter), self._adapter.chunks, self._optimizer, self._adapter.mesh)
        return TracingSession(plan, adapter.chunks, self._optimizer, adapter, self._rules)

    # One check

    def check(self) -> list[Disagreement]:
        """Compare everything now, on all ranks; return what is new. Every rank must call it in the same step."""
        try:
            held = list(self._replicas.collect())
            prints = self._measure(held)
        except Exception as error:  # the training must go on, and other ranks must not wait
            gather([0] * self._num_numbers, self._device)
            self._switch_off(f"it cannot read the model: {type(error).__name__}: {error}")
            return []
        self.num_checks += 1
        data, repeated = self._data.read()
        random, self._random = self._random, self._read_random()
        has_drawn = random not in (0, self._random)
        local = [*self._find_frozen(held, prints), *(("data", Trouble.REPEATED_DATA) for _ in repeated[:1])]
        tables = {axis: self._choose(held, prints, axis) for axis in self._axes}
        numbers = [number for axis in self._axes for number in _summarise(tables[axis])]
        numbers += [data, self._random if has_drawn else 0, self._num_calls, len(local), 1]
        rows = gather(numbers, self._device)
        lost = [rank for rank, row in enumerate(rows) if not row[-1]]
        if lost:
            self._switch_off(f"ranks {lost} cannot read their model")
            return []
        found = list(self._compare(rows, tables, local))
        self._before = prints
        return self._tell(found, {each.site: each.tensor for each in held})

    def _switch_off(self, why: str) -> None:
        """Stop watching, and let the training go on: a fault of the watch is none of the training."""
        self.close()
        _LOG.error("ttrace.watch is off from step %d on: %s", self.step, why)

    @property
    def _num_numbers(self) -> int:
        """How many numbers each rank tells: three for each axis, and data, random state, steps, own troubles, life."""
        return _PER_AXIS * len(self._axes) + 5

    def _measure(self, held: Sequence[HeldReplica]) -> dict[str, int]:
        with torch.no_grad():
            found = read_fingerprints([make_fingerprint(each.tensor) for each in held])
        return {each.site: value for each, value in zip(held, found, strict=True)}

    def _choose(self, held: Iterable[HeldReplica], prints: Mapping[str, int], axis: str) -> dict[str, int]:
        """Choose what must be equal along an axis. Along data, a buffer may have statistics of a rank's own data."""
        chosen = {}
        for each in held:
            is_own = each.kind is Kind.BUFFER and axis in self._adapter.data_axes
            if axis in each.axes and not (is_own and self._before.get(each.site) != prints[each.site]):
                chosen[each.site] = prints[each.site]
        return chosen

    def _read_random(self) -> int:
        state = make_fingerprint(torch.get_rng_state())
        return int(read_fingerprints([state])[0])

    def _find_frozen(self, held: Iterable[HeldReplica], prints: Mapping[str, int]) -> Iterator[tuple[str, Trouble]]:
        """Find trained parameters that have a gradient and did not change since the last check."""
        unchanged = [
            each.site.rpartition("/")[0]
            for each in held
            if each.kind is Kind.PARAM and each.tensor.numel() and self._before.get(each.site) == prints[each.site]
        ]
        if not unchanged or self.num_checks == 1:
            return
        trained = {name: self._replicas.parameters[name] for name in unchanged}
        groups = self._adapter.find_groups(self._optimizer, trained.values()) if self._optimizer is not None else ()
        at_rest = {id(parameter) for parameter, group in groups if not group.get("lr", 1.0)}
        for name, parameter in trained.items():
            gradient = self._adapter.read_gradient(parameter)
            if gradient is None or not parameter.requires_grad or id(parameter) in at_rest:
                continue
            if bool(self._adapter.to_local(gradient.tensor).any()):
                yield f"{name}/{Kind.PARAM}", Trouble.FROZEN

    def _compare(
        self,
        rows: Sequence[Sequence[int]],
        tables: Mapping[str, Mapping[str, int]],
        local: Sequence[tuple[str, Trouble]],
    ) -> Iterator[Disagreement]:
        """Compare what all ranks told, what may be the cause of others first; every rank comes to the same result."""
        num = _PER_AXIS * len(self._axes)
        parted = split({rank: row[num + 2] for rank, row in enumerate(rows)})
        if parted is not None:
            counts = ", ".join(f"rank {rank} {rows[rank][num + 2]}" for rank in parted.wrong[:4])
            yield Disagreement(
                Trouble.STEP_COUNT, self.step, "steps", parted.wrong, parted.majority, detail=f"steps: {counts}"
            )
        for group in self._apart:
            for ranks in find_equal({rank: rows[rank][num] for rank in group if rows[rank][num]}):
                axis = " ".join(self._adapter.data_axes)
                yield Disagreement(Trouble.SAME_DATA, self.step, "data", ranks, axis=axis)
        for axis in self._alike:
            for number, trouble in ((num, Trouble.OTHER_DATA), (num + 1, Trouble.RANDOM_STATE)):
                yield from self._find_unlike(axis, trouble, [row[number] for row in rows])
        suspects = [
            axis
            for number, axis in enumerate(self._axes)
            if any(_differ(rows, group, _PER_AXIS * number) for group in self._groups[axis])
        ]
        if suspects:
            everyones = gather_objects({axis: dict(tables[axis]) for axis in suspects})
            for axis in suspects:
                yield from self._find_sites(axis, [each[axis] for each in everyones])
        if any(row[num + 3] for row in rows):
            yield from self._find_local(gather_objects(list(local)))

    def _find_sites(self, axis: str, everyones: Sequence[Mapping[str, int]]) -> Iterator[Disagreement]:
        for group in self._groups[axis]:
            sites = dict.fromkeys(site for rank in group for site in everyones[rank])
            is_sharded = len({_list_states(everyones[rank]) for rank in group}) > 1
            for site in sites:
                if is_sharded and _is_state(site):
                    continue
                parted = split({rank: everyones[rank].get(site) for rank in group})
                if parted is not None:
                    yield Disagreement(
                        Trouble.REPLICAS_DIFFER, self.step, site, parted.wrong, parted.majority, axis=axis
                    )

    def _find_unlike(self, axis: str, trouble: Trouble, numbers: Sequence[int]) -> Iterator[Disagreement]:
        for group in self._groups[axis]:
            parted = split({rank: numbers[rank] for rank in group})
            if parted is not None:
                site = "data" if trouble is Trouble.OTHER_DATA else "random state"
                yield Disagreement(trouble, self.step, site, parted.wrong, parted.majority, axis=axis)

    def _find_local(self, everyones: Sequence[Sequence[tuple[str, Trouble]]]) -> Iterator[Disagreement]:
        ranks: dict[tuple[str, Trouble], list[int]] = {}
        for rank, found in enumerate(everyones):
            for one in found:
                ranks.setdefault(one, []).append(rank)
        for (site, trouble), where in ranks.items():
            yield Disagreement(trouble, self.step, site, tuple(where))

    def _tell(self, found: Sequence[Disagreement], tensors: Mapping[str, torch.Tensor]) -> list[Disagreement]:
        """Tell what is new; what was told before is told again only after it was right."""
        keys = {(each.trouble, each.site) for each in found}
        new = [each for each in found if (each.trouble, each.site) not in self._known]
        self._known = keys
        kept = []
        for number, each in enumerate(new):
            if each.trouble is Trouble.REPLICAS_DIFFER and number < _NUM_SHOWN:
                each = describe_difference(each, tensors.get(each.site), self._adapter.rank)
                each = keep_evidence(each, tensors.get(each.site), self._adapter.rank, self._out)
            kept.append(each)
        self.disagreements += kept
        if callable(self._on_disagreement):
            for each in kept:
                self._on_disagreement(each)
        elif kept and self._on_disagreement == "raise":
            raise DisagreementError(_join(kept))
        elif kept and self._adapter.rank == 0:
            _LOG.warning("ttrace.watch: %s", _join(kept))
        return kept


def _summarise(table: Mapping[str, int]) -> tuple[int, int, int]:
    """Summarise what must be equal along an axis: all but the optimizer's state, that state, and whose it is.

    A sharded optimizer keeps the state of some parameters only: then it is not compared.
    """
    states = {site: value for site, value in table.items() if _is_state(site)}
    others = {site: value for site, value in table.items() if site not in states}
    return combine(others.items()), combine(states.items()), combine((site, 1) for site in states)


def _differ(rows: Sequence[Sequence[int]], group: Iterable[int], first: int) -> bool:
    others, states, owners = ({rows[rank][first + i] for rank in group} for i in range(_PER_AXIS))
    return len(others) > 1 or (len(owners) == 1 and len(states) > 1)


def _is_state(site: str) -> bool:
    return site.rpartition("/")[2].startswith(f"{Kind.OPTIM}.")


def _list_states(table: Mapping[str, int]) -> frozenset[str]:
    return frozenset(filter(_is_state, table))


def _join(found: Sequence[Disagreement]) -> str:
    more = f"\n... and {len(found) - _NUM_SHOWN} more" if len(found) > _NUM_SHOWN else ""
    return "\n".join(map(str, found[:_NUM_SHOWN])) + more


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
    """Choose the adapter, and watch the model with it."""
    if every < 1:
        raise CaptureError(f"watch(every={every}): it must be at least 1.")
    _, found, adapter = choose_adapter(model, optimizer, declared)
    if ANONYMOUS_AXIS in adapter.mesh.sizes:
        raise CaptureError(
            "watch does not know what the ranks of this job share: the model is neither wrapped by DDP or FSDP2 nor "
            'made of DTensors. Pass watch(mesh=...), for instance {"dp": 8} if each rank has data of its own.'
        )
    wait_for_gloo_at_exit()
    return Monitor(adapter, found, declared.rules, every=every, on_disagreement=on_disagreement, out=out, trace=trace)
