"""Origins: the tensors where something starts to be wrong.

The order is the reference's order of appearance, backward included. An origin is a wrong site whose module got right
inputs (in backward: a right incoming gradient). The innermost module wins. A module that is wrong, while everything
inside it follows from wrong inputs, is wrong in its own code. Every origin is a finding of its own, and the first wrong
tensor is always in one of them.

An isolated run replaces what enters a module, so a module's tensors show that module alone. What arrived there is
compared too: if it is wrong while the modules it came from are right, the code of the module around them is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ttrace.judge.causes.registry import find_cause
from ttrace.judge.verdict import UNEXAMINED, VAGUE, Cause, CauseName, Comparison, Finding, Verdict
from ttrace.layouts.ids import ROOT, Kind, TensorId, is_inside, list_around
from ttrace.trace.reader import Trace

_MADE_FROM = (Kind.INPUT, Kind.OUTPUT, Kind.PARAM, Kind.RECOMPUTE_INPUT)
_NEEDS: dict[Kind, tuple[Kind, ...]] = {
    Kind.OUTPUT: (Kind.INPUT, Kind.PARAM),
    Kind.DECISION: (Kind.INPUT, Kind.PARAM),
    Kind.LOSS: (Kind.OUTPUT, Kind.PARAM),
    Kind.GRAD_OUTPUT: (Kind.LOSS, Kind.OUTPUT),
    Kind.GRAD_INPUT: (Kind.GRAD_OUTPUT, *_MADE_FROM, Kind.LOSS),
    Kind.RECOMPUTE_OUTPUT: (Kind.RECOMPUTE_INPUT,),
    Kind.PARAM_GRAD: (Kind.GRAD_OUTPUT, *_MADE_FROM, Kind.LOSS, Kind.MAIN_GRAD),
    Kind.MAIN_GRAD: (Kind.GRAD_OUTPUT, *_MADE_FROM, Kind.LOSS),
    Kind.BUFFER_AFTER: (Kind.INPUT, Kind.PARAM, Kind.BUFFER, Kind.DECISION),
}
"""What must be right at the same module for a wrong site to be an origin."""

_MOST_EXAMINED = 30
"""How many findings get a cause: each is looked for in all that was recorded."""
_When = tuple[int, int | None, Kind]
_FORWARD, _BACKWARD, _UPDATE = range(3)
_ANY = object()
_MADE_INSIDE = frozenset(
    {Kind.OUTPUT, Kind.RECOMPUTE_OUTPUT, Kind.GRAD_INPUT, Kind.MAIN_GRAD, Kind.PARAM_GRAD, Kind.BUFFER_AFTER}
)
"""What modules inside a module may have spoilt."""


_PHASES = {kind: _BACKWARD if kind.is_backward else _FORWARD for kind in Kind} | dict.fromkeys(
    (Kind.GRAD_NORM, Kind.CLIP, Kind.PARAM_AFTER, Kind.UPDATE, Kind.OPTIM), _UPDATE
)


def find_origins(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> tuple[Finding, ...]:
    """Find every origin, and its cause; the first divergence comes first."""
    wrong = {c.id: c for c in comparisons if c.verdict.is_wrong and not c.id.kind.is_of_call}
    if not wrong:
        return ()
    sites = _WrongSites(
        list(wrong),
        _find_called(comparisons),
        _find_replaced(reference),
        _find_missing(comparisons),
        _find_integers(wrong, reference),
    )
    order = {tensor_id: place for place, tensor_id in enumerate(wrong, 1)}
    beside = _Beside.of(comparisons, candidate)
    return tuple(
        Finding(
            wrong[start],
            sites.maker_of(start),
            _find_source(sites.maker_of(start), candidate),
            _choose_cause(wrong[start], sites.maker_of(start), beside, reference, candidate)
            if number < _MOST_EXAMINED
            else UNEXAMINED,
            num_after=len(order) - order[start],
        )
        for number, start in enumerate(sites.origins())
    )


def _find_called(comparisons: Sequence[Comparison]) -> frozenset[str]:
    """The modules that ran; a module does not run if its parent uses its parameters directly."""
    return frozenset(c.id.name for c in comparisons if c.id.kind in (Kind.INPUT, Kind.OUTPUT, Kind.DECISION))


def _find_missing(comparisons: Sequence[Comparison]) -> frozenset[TensorId]:
    """What the candidate does not have."""
    return frozenset(c.id for c in comparisons if c.verdict is Verdict.MISSING)


def _find_integers(ids: Iterable[TensorId], reference: Trace) -> frozenset[TensorId]:
    return frozenset(
        t for t in ids if t in reference.shards and not reference.shards[t][0].record.dtype.is_floating_point
    )


@dataclass(frozen=True)
class _Beside:
    """What beside a wrong tensor may show its cause; collected once for all findings."""

    wrong: Mapping[_When, Sequence[Comparison]]
    """What is wrong of a kind, in a step and microbatch, in order."""
    absent: Sequence[str]
    """The modules that only the reference ran in some step or microbatch,"""
    idle: Sequence[str]
    """and those of them that the candidate has, and never ran."""

    @classmethod
    def of(cls, comparisons: Sequence[Comparison], candidate: Trace) -> _Beside:
        wrong: dict[_When, list[Comparison]] = {}
        for c in comparisons:
            if c.verdict.is_wrong:
                wrong.setdefault((c.id.step, c.id.microbatch, c.id.kind), []).append(c)
        absent = [c.id.name for c in comparisons if c.id.kind is Kind.OUTPUT and c.verdict is Verdict.MISSING]
        ran = {c.id.name for c in comparisons if c.id.kind is Kind.OUTPUT and c.verdict is not Verdict.MISSING}
        idle = [name for name in dict.fromkeys(absent) if name not in ran and candidate.owners(name)]
        return cls(wrong, absent, idle)

    def list_wrong(self, start: Comparison, kind: Kind) -> Sequence[Comparison]:
        """List what is wrong of a kind when this tensor is."""
        return self.wrong.get((start.id.step, start.id.microbatch, kind), ())


def _choose_cause(start: Comparison, module: str, beside: _Beside, reference: Trace, candidate: Trace) -> Cause:
    """Find the cause in the values or, if they show nothing, in the modules inside this one."""
    found = find_cause(start, reference, candidate)
    if found.name not in VAGUE:
        return found
    skipped = _explain_by_skipped(module, beside) if found.name is CauseName.UNEXPLAINED else None
    if start.id.kind is Kind.LOSS:
        return skipped or _explain_by_gradient(start, beside, reference, candidate) or found
    return skipped or _explain_by_handover(start, module, beside, reference, candidate) or found


def _explain_by_gradient(loss: Comparison, beside: _Beside, reference: Trace, candidate: Trace) -> Cause | None:
    """Find the cause of a wrong loss in its gradient, which has many values; the loss is one number."""
    for c in beside.list_wrong(loss, Kind.GRAD_OUTPUT):
        if c.id.name == loss.id.name:
            found = find_cause(c, reference, candidate)
            return None if found.name in VAGUE else replace(found, sentence=f"its gradient shows: {found.sentence}")
    return None


def _explain_by_handover(
    start: Comparison, module: str, beside: _Beside, reference: Trace, candidate: Trace
) -> Cause | None:
    """Find the cause in the first wrong tensor that enters a module inside: this module's code made it.

    If a module inside is missing, that is the cause, and other modules' inputs follow from it.
    """
    kind = {Kind.OUTPUT: Kind.INPUT, Kind.GRAD_INPUT: Kind.GRAD_OUTPUT}.get(start.id.kind)
    if kind is None or any(is_inside(name, module) for name in beside.absent):
        return None
    for c in beside.list_wrong(start, kind):
        if c.id.name != module and is_inside(c.id.name, module):
            found = find_cause(c, reference, candidate)
            words = f"what enters {c.id.name} is wrong ({c.id.kind}): {found.sentence}"
            return None if found.name in VAGUE else replace(found, sentence=words)
    return None


def _explain_by_skipped(module: str, beside: _Beside) -> Cause | None:
    """Find modules inside this one that the candidate has, and that only the reference ran."""
    inside = [name for name in beside.idle if name != module and is_inside(name, module)]
    outermost = [name for name in inside if not any(name != other and is_inside(name, other) for other in inside)]
    if not outermost:
        return None
    named = ", ".join(outermost[:4]) + (f" and {len(outermost) - 4} more" if len(outermost) > 4 else "")
    return Cause(CauseName.SKIPPED, f"the candidate never runs {named}")


def _find_replaced(reference: Trace) -> frozenset[TensorId]:
    """What isolation replaced on its way into a module."""
    enters = (Kind.INPUT, Kind.GRAD_OUTPUT)
    return frozenset(t for t, shards in reference.shards.items() if t.kind in enters and shards[0].record.values)


class _WrongSites:
    """Which tensors are wrong at which module."""

    def __init__(
        self,
        wrong: list[TensorId],
        called: frozenset[str],
        replaced: frozenset[TensorId],
        missing: frozenset[TensorId],
        integers: frozenset[TensorId],
    ) -> None:
        self._wrong_ids = wrong
        self._wrong = frozenset(wrong)
        self._called = called
        self._replaced = replaced
        self._missing = missing
        self._integers = integers
        self._first_step = min(t.step for t in wrong)
        self._kinds = {(t.step, t.kind) for t in wrong}
        self._at: set[tuple[str, Kind, int, object, object]] = set()
        """Module, kind, step, microbatch and call of all that are wrong, and the same of any microbatch or call."""
        self._made_inside: set[tuple[str, Kind, int, int | None]] = set()
        """The modules in which something of a kind is wrong, with its step and microbatch."""
        self._first_inside: dict[tuple[str, int], TensorId] = {}
        """By module and step, the first tensor in it that is wrong in the forward pass."""
        for t in wrong:
            if t not in replaced:
                both = itertools.product((t.microbatch, _ANY), (t.call, _ANY))
                self._at |= {(self.module_of(t), t.kind, t.step, microbatch, call) for microbatch, call in both}
            for module in list_around(t.name):
                self._made_inside.add((module, t.kind, t.step, t.microbatch))
                if _find_phase(t) == _FORWARD:
                    self._first_inside.setdefault((module, t.step), t)

    def module_of(self, t: TensorId) -> str:
        """The module of an id; for parameters, buffers and replaced tensors, the innermost module that ran."""
        if not t.kind.is_of_param and not t.kind.is_of_buffer and t not in self._replaced:
            return t.name
        return self._find_around(t.name)

    def maker_of(self, t: TensorId) -> str:
        """The module whose code made a tensor: integers that enter a module are made by the one around it."""
        is_handed_over = t.kind is Kind.INPUT and t in self._integers and t.name != ROOT
        return self._find_around(t.name) if is_handed_over else self.module_of(t)

    def _find_around(self, name: str) -> str:
        """The innermost module around that ran."""
        module = name.rpartition(".")[0]
        while module and module not in self._called:
            module = module.rpartition(".")[0]
        return module or ROOT

    def origins(self) -> list[TensorId]:
        """Find the first wrong site of every module that is wrong by itself; there is at least one."""
        starts = [t for t in self._wrong_ids if t.step == self._first_step and self._starts_at(t)]
        modules = {(self.module_of(t), _find_phase(t)) for t in starts}
        around = {(outer, phase) for inner, phase in modules for outer in list_around(inner) if outer != inner}
        found: dict[tuple[str, int], TensorId] = {}
        for t in starts:
            if not self._has_inner(t, around):
                # Other slots, calls and microbatches of the same module have the same cause.
                found.setdefault((self.module_of(t), _find_phase(t)), self._choose_telling(t))
        first = min((t for t in self._wrong_ids if t.step == self._first_step), key=_find_phase)
        is_covered = any(t == first or self._explains(t, first) for t in found.values())
        return list(found.values()) if is_covered else [first, *found.values()]

    def _choose_telling(self, t: TensorId) -> TensorId:
        """Of a parameter after a step and its update, both wrong, the update says more.

        So do integers that a module's own code handed to a module inside, before anything else there was wrong.
        """
        update = t.at(Kind.UPDATE)
        if t.kind is Kind.PARAM_AFTER and update in self._wrong:
            return update
        if t.kind is not Kind.OUTPUT:
            return t
        first = self._first_inside.get((t.name, t.step), t)
        return first if first.kind is Kind.INPUT and first in self._integers else t

    def _starts_at(self, t: TensorId) -> bool:
        """Whether everything this site is made from is right."""
        if t in self._replaced:
            return not self._is_made_inside(t)
        if any(self._is_wrong(kind, t) for kind in _NEEDS.get(t.kind, ())):
            return False
        if t.kind in (Kind.INPUT, Kind.GRAD_OUTPUT):
            # Any other module's are made by its neighbours, or by its parent's own code.
            return self.module_of(t) == ROOT
        if t.kind in (Kind.GRAD_NORM, Kind.CLIP):
            # Made from every gradient, wherever it is.
            made_from = (Kind.PARAM_GRAD, Kind.MAIN_GRAD, *([Kind.GRAD_NORM] if t.kind is Kind.CLIP else []))
            return not any((t.step, kind) in self._kinds for kind in made_from)
        if _find_phase(t) == _UPDATE:
            if any((t.step, kind) in self._kinds for kind in (Kind.GRAD_NORM, Kind.CLIP)):
                return False  # a wrong norm clips every gradient wrongly
            if self._missing and t.at(Kind.PARAM_GRAD, slot="") in self._missing:
                return False  # without a gradient there is nothing to step with
            made_from = (Kind.PARAM, Kind.PARAM_GRAD, Kind.MAIN_GRAD)
            before = [t.at(kind, slot="") for kind in made_from if (t.step, kind) in self._kinds]
            return not any(other in self._wrong and other not in self._replaced for other in before)
        return True

    def _is_wrong(self, kind: Kind, t: TensorId) -> bool:
        """Whether this kind is wrong at the id's module, in the same step, microbatch and call where it has one."""
        microbatches = (_ANY,) if t.microbatch is None else (None, t.microbatch)
        call = _ANY if t.kind.is_of_param or t.kind.is_of_buffer else t.call
        return any((self.module_of(t), kind, t.step, microbatch, call) in self._at for microbatch in microbatches)

    def _is_made_inside(self, t: TensorId) -> bool:
        """Whether what arrived here was made from a wrong tensor of a module in the module around it."""
        made_from = (Kind.OUTPUT,) if t.kind is Kind.INPUT else (Kind.OUTPUT, Kind.LOSS, Kind.GRAD_INPUT)
        then = itertools.product(made_from, (None, t.microbatch))
        return any((self.module_of(t), kind, t.step, microbatch) in self._made_inside for kind, microbatch in then)

    def _explains(self, origin: TensorId, t: TensorId) -> bool:
        """Whether a wrong tensor inside an origin's module, in the same pass, has the same cause."""
        is_same_way = origin.kind is not Kind.LOSS and _find_phase(origin) == _find_phase(t)
        return is_same_way and is_inside(self.module_of(t), self.module_of(origin))

    def _has_inner(self, t: TensorId, around: set[tuple[str, int]]) -> bool:
        """Whether a module inside this one is wrong by itself in the same direction: `around` has all around such.

        In isolation also in the direction before: what an inner forward spoils arrives nowhere, but its backward does.
        """
        module = self.module_of(t)
        phases = range(_find_phase(t) + 1) if self._replaced else (_find_phase(t),)
        return t.kind in _MADE_INSIDE and any((module, phase) in around for phase in phases)


def _find_phase(t: TensorId) -> int:
    # A module's own loss is known when its gradient comes.
    return _BACKWARD if t.kind is Kind.LOSS and t.name != ROOT else _PHASES[t.kind]


def _find_source(module: str, candidate: Trace) -> str:
    """Where the module is written: for torch's own layers the module around them."""
    while True:
        for rank in candidate.ranks:
            info = rank.manifest.modules.get(module)
            if info is not None and info.source and not info.type.startswith("torch."):
                return info.source
        if module == ROOT:
            return ""
        module = module.rpartition(".")[0] or ROOT
