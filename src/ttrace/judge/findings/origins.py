"""Origins: the tensors where something starts to be wrong.

The order is the reference's order of appearance, backward included. An origin is a wrong tensor whose module got right
inputs (in backward: a right incoming gradient). The innermost module wins. A module that is wrong, while everything
inside it follows from wrong inputs, is wrong in its own code. Every origin is a finding of its own, and the first wrong
tensor is always covered by one of them. If the gradients of all parameters are wrong for the same cause, they become
one finding.

An isolated run replaces what enters a module, so a module's tensors show that module alone. The tensors that arrived
before they were replaced are compared too: if one is wrong although the modules that it came from are right, the code
of the module around them is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ttrace.judge.causes.evidence import MOST_TOLERANCES
from ttrace.judge.causes.search import find_cause
from ttrace.judge.verdict import FACTORS, UNEXAMINED, VAGUE, Cause, CauseName, Comparison, Finding, Verdict
from ttrace.layouts.ids import ROOT, Kind, Phase, TensorId, is_inside, list_around
from ttrace.trace.reader import Trace

_MADE_FROM = (Kind.INPUT, Kind.OUTPUT, Kind.PARAM, Kind.RECOMPUTE_INPUT)
_MUST_BE_RIGHT: dict[Kind, tuple[Kind, ...]] = {
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
"""The kinds at the same module that must be right for a wrong tensor to be an origin."""

_MOST_EXAMINED = 30
"""Only this many findings get a cause, because some detectors read everything that was recorded."""
_ANY = object()
"""Stands for any microbatch or any call in the keys of `_WrongSites`; None is a microbatch of its own."""
_IN_ORDER = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""The phases of tensors, in the order in which they run."""
_MADE_INSIDE = frozenset(
    {Kind.OUTPUT, Kind.RECOMPUTE_OUTPUT, Kind.GRAD_INPUT, Kind.MAIN_GRAD, Kind.PARAM_GRAD, Kind.BUFFER_AFTER}
)
"""The kinds of a module that may be wrong because of a module inside it."""
_GRADIENTS = (Kind.PARAM_GRAD, Kind.MAIN_GRAD)
_AFTER_GRADIENTS = (Kind.GRAD_NORM, Kind.CLIP, Kind.UPDATE, Kind.PARAM_AFTER, Kind.OPTIM, Kind.CALL, Kind.CALL_GRAD)
"""The kinds that follow from gradients, and those of operations, which are not judged."""
_WHERE = "activation gradients are right: look at how parameter gradients are accumulated, reduced and scaled"


def find_origins(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> tuple[Finding, ...]:
    """Find every origin and its cause; the first divergence comes first."""
    wrong = {c.id: c for c in comparisons if c.verdict.is_wrong and not c.id.kind.is_of_call}
    if not wrong:
        return ()
    sites = _WrongSites(list(wrong), comparisons, reference)
    order = {tensor_id: place for place, tensor_id in enumerate(wrong, 1)}
    surroundings = _Surroundings.of(comparisons, candidate)
    return tuple(
        Finding(
            wrong[start],
            sites.maker_of(start),
            find_source(sites.maker_of(start), candidate),
            _choose_cause(wrong[start], sites.maker_of(start), surroundings, reference, candidate)
            if number < _MOST_EXAMINED
            else UNEXAMINED,
            num_after=len(order) - order[start],
        )
        for number, start in enumerate(sites.origins())
    )


def merge_gradients(findings: Sequence[Finding], comparisons: Sequence[Comparison]) -> tuple[Finding, ...]:
    """Merge the findings of single parameters if all gradients are wrong for the same cause.

    Such a cause is not in a module but after the backward. The first finding stays in its place without the module's
    source.
    """
    accused = [finding for finding in findings if finding.comparison.id.kind in _GRADIENTS]
    causes = {(f.cause.name, f.cause.axis) for f in accused if f.cause is not UNEXAMINED}
    if len(accused) < 2 or len(causes) > 1:
        return tuple(findings)
    first = accused[0]
    wrong = _find_all_wrong(first.comparison.id, comparisons)
    if wrong is None or (first.cause.name in FACTORS and not _have_one_factor(wrong)):
        return tuple(findings)
    count = len({c.id.name for c in wrong})
    words = f"in all {count} parameter gradients {first.cause.sentence}"
    if first.cause.name is CauseName.UNEXPLAINED:
        words = f"all {count} parameter gradients are wrong, and {first.cause.sentence}"
    evidence = (*first.cause.evidence, _WHERE)
    covers = frozenset(c.id for c in wrong if c.id != first.comparison.id)
    cause = replace(first.cause, sentence=words, evidence=evidence)
    merged = replace(first, source="", cause=cause, covers=covers)
    others = {finding.comparison.id for finding in accused[1:]}
    return tuple(merged if finding is first else finding for finding in findings if finding.comparison.id not in others)


@dataclass(frozen=True)
class _Surroundings:
    """Everything else that may show the cause of a wrong tensor; collected once for all findings."""

    wrong: Mapping[tuple[int, int | None, Kind], Sequence[Comparison]]
    """The wrong tensors by step, microbatch and kind, in order of appearance."""
    absent: Sequence[str]
    """The modules that only the reference ran, in at least one step and microbatch."""
    idle: Sequence[str]
    """The modules that the candidate has and never ran, although the reference ran them."""

    @classmethod
    def of(cls, comparisons: Sequence[Comparison], candidate: Trace) -> _Surroundings:
        wrong: dict[tuple[int, int | None, Kind], list[Comparison]] = {}
        for c in comparisons:
            if c.verdict.is_wrong:
                wrong.setdefault((c.id.step, c.id.microbatch, c.id.kind), []).append(c)
        absent = [c.id.name for c in comparisons if c.id.kind is Kind.OUTPUT and c.verdict is Verdict.MISSING]
        ran = {c.id.name for c in comparisons if c.id.kind is Kind.OUTPUT and c.verdict is not Verdict.MISSING}
        idle = [name for name in dict.fromkeys(absent) if name not in ran and candidate.owners(name)]
        return cls(wrong, absent, idle)

    def list_wrong(self, start: Comparison, kind: Kind) -> Sequence[Comparison]:
        """List the wrong tensors of a kind in the step and microbatch of this one."""
        return self.wrong.get((start.id.step, start.id.microbatch, kind), ())


def _choose_cause(
    start: Comparison, module: str, surroundings: _Surroundings, reference: Trace, candidate: Trace
) -> Cause:
    """Find the cause in the values or, if they show nothing, in the modules inside this one."""
    own = find_cause(start, reference, candidate)
    if own.name not in VAGUE:
        return own
    skipped = _explain_by_skipped(module, surroundings) if own.name is CauseName.UNEXPLAINED else None
    if start.id.kind is Kind.LOSS:
        return skipped or _explain_by_gradient(start, surroundings, reference, candidate) or own
    return skipped or _explain_by_handover(start, module, surroundings, reference, candidate) or own


def _explain_by_gradient(
    loss: Comparison, surroundings: _Surroundings, reference: Trace, candidate: Trace
) -> Cause | None:
    """Find the cause of a wrong loss in its gradient, which has many values; the loss is one number."""
    for c in surroundings.list_wrong(loss, Kind.GRAD_OUTPUT):
        if c.id.name == loss.id.name:
            cause = find_cause(c, reference, candidate)
            return None if cause.name in VAGUE else replace(cause, sentence=f"its gradient shows: {cause.sentence}")
    return None


def _explain_by_handover(
    start: Comparison, module: str, surroundings: _Surroundings, reference: Trace, candidate: Trace
) -> Cause | None:
    """Find the cause in the first wrong tensor that this module's own code hands to a module inside it.

    If a module inside is missing, that is the cause, and the inputs of other modules follow from it.
    """
    kind = {Kind.OUTPUT: Kind.INPUT, Kind.GRAD_INPUT: Kind.GRAD_OUTPUT}.get(start.id.kind)
    if kind is None or any(is_inside(name, module) for name in surroundings.absent):
        return None
    for c in surroundings.list_wrong(start, kind):
        if c.id.name != module and is_inside(c.id.name, module):
            cause = find_cause(c, reference, candidate)
            words = f"what enters {c.id.name} is wrong ({c.id.kind}): {cause.sentence}"
            return None if cause.name in VAGUE else replace(cause, sentence=words)
    return None


def _explain_by_skipped(module: str, surroundings: _Surroundings) -> Cause | None:
    """Find modules inside this one that the candidate has but never ran."""
    inside = [name for name in surroundings.idle if name != module and is_inside(name, module)]
    outermost = [name for name in inside if not any(name != other and is_inside(name, other) for other in inside)]
    if not outermost:
        return None
    named = ", ".join(outermost[:4]) + (f" and {len(outermost) - 4} more" if len(outermost) > 4 else "")
    return Cause(CauseName.SKIPPED, f"the candidate never runs {named}")


class _WrongSites:
    """The wrong tensors of a run, indexed by module, and the search for origins among them."""

    def __init__(self, wrong: list[TensorId], comparisons: Sequence[Comparison], reference: Trace) -> None:
        self._in_order = wrong
        self._wrong = frozenset(wrong)
        self._called = {c.id.name for c in comparisons if c.id.kind in (Kind.INPUT, Kind.OUTPUT, Kind.DECISION)}
        """The modules that ran; a module does not run if its parent uses its parameters directly."""
        first = {t: shards[0].record for t, shards in reference.shards.items()}
        self._replaced = {t for t in first if t.kind in (Kind.INPUT, Kind.GRAD_OUTPUT) and first[t].values}
        """The tensors that isolation replaced where they enter a module."""
        self._missing = {c.id for c in comparisons if c.verdict is Verdict.MISSING}
        """The tensors that only the reference has."""
        self._integers = {t for t in wrong if t in first and not first[t].dtype.is_floating_point}
        """The tensors that are not of floating-point numbers in the reference."""
        self._first_step = min(t.step for t in wrong)
        self._kinds = {(t.step, t.kind) for t in wrong}
        """The kinds of which anything is wrong in a step."""
        self._at: set[tuple[str, Kind, int, object, object]] = set()
        """Module, kind, step, microbatch and call of each wrong tensor; again with `_ANY` as microbatch and as call."""
        self._wrong_inside: set[tuple[str, Kind, int, int | None]] = set()
        """Module, kind, step and microbatch of each wrong tensor, for its own module and for all modules around."""
        self._first_inside: dict[tuple[str, int], TensorId] = {}
        """By module and step, the first tensor inside the module that is wrong in the forward pass."""
        for t in wrong:
            if t not in self._replaced:
                both = itertools.product((t.microbatch, _ANY), (t.call, _ANY))
                self._at |= {(self.module_of(t), t.kind, t.step, microbatch, call) for microbatch, call in both}
            for module in list_around(t.name):
                self._wrong_inside.add((module, t.kind, t.step, t.microbatch))
                if _find_phase(t) is Phase.FORWARD:
                    self._first_inside.setdefault((module, t.step), t)

    def module_of(self, t: TensorId) -> str:
        """Return the module of a tensor; for parameters, buffers and replaced tensors, the innermost that ran."""
        if not t.kind.is_of_param and not t.kind.is_of_buffer and t not in self._replaced:
            return t.name
        return self._find_around(t.name)

    def maker_of(self, t: TensorId) -> str:
        """Return the module whose code made a tensor: integers that enter a module are made by the one around it."""
        is_handed_over = t.kind is Kind.INPUT and t in self._integers and t.name != ROOT
        return self._find_around(t.name) if is_handed_over else self.module_of(t)

    def _find_around(self, name: str) -> str:
        """Find the innermost module around this name that ran."""
        module = name.rpartition(".")[0]
        while module and module not in self._called:
            module = module.rpartition(".")[0]
        return module or ROOT

    def origins(self) -> list[TensorId]:
        """Find the first wrong tensor of every module that is wrong by itself; there is at least one."""
        starts = [t for t in self._in_order if t.step == self._first_step and self._is_made_from_right(t)]
        modules = {(self.module_of(t), _find_phase(t)) for t in starts}
        around = {(outer, phase) for inner, phase in modules for outer in list_around(inner) if outer != inner}
        origins: dict[tuple[str, Phase], TensorId] = {}
        for t in starts:
            if not self._has_inner_start(t, around):
                # Other slots, calls and microbatches of the same module have the same cause.
                origins.setdefault((self.module_of(t), _find_phase(t)), self._choose_shown(t))
        of_first_step = (t for t in self._in_order if t.step == self._first_step)
        first = min(of_first_step, key=lambda t: _IN_ORDER.index(_find_phase(t)))
        is_covered = any(t == first or self._explains(t, first) for t in origins.values())
        return list(origins.values()) if is_covered else [first, *origins.values()]

    def _choose_shown(self, t: TensorId) -> TensorId:
        """Choose the tensor in which the cause of an origin shows best.

        If a parameter after a step and its update are both wrong, that is the update. If the first wrong tensor inside
        a module is integers that the module's own code handed to a module inside, it is those integers.
        """
        update = t.at(Kind.UPDATE)
        if t.kind is Kind.PARAM_AFTER and update in self._wrong:
            return update
        if t.kind is not Kind.OUTPUT:
            return t
        first = self._first_inside.get((t.name, t.step), t)
        return first if first.kind is Kind.INPUT and first in self._integers else t

    def _is_made_from_right(self, t: TensorId) -> bool:
        """Whether all tensors that a wrong one is made from are right."""
        if t in self._replaced:
            return not self._is_made_by_wrong(t)
        if any(self._is_wrong(kind, t) for kind in _MUST_BE_RIGHT.get(t.kind, ())):
            return False
        if t.kind in (Kind.INPUT, Kind.GRAD_OUTPUT):
            # Those of all other modules are made by their neighbours, or by the code of the module around.
            return self.module_of(t) == ROOT
        if t.kind in (Kind.GRAD_NORM, Kind.CLIP):
            # These are made from the gradients of all modules.
            made_from = (Kind.PARAM_GRAD, Kind.MAIN_GRAD, *([Kind.GRAD_NORM] if t.kind is Kind.CLIP else []))
            return not any((t.step, kind) in self._kinds for kind in made_from)
        if _find_phase(t) is Phase.OPTIMIZER:
            if any((t.step, kind) in self._kinds for kind in (Kind.GRAD_NORM, Kind.CLIP)):
                return False  # a wrong norm clips every gradient wrongly
            if self._missing and t.at(Kind.PARAM_GRAD, slot="") in self._missing:
                return False  # without a gradient the optimizer skips the parameter
            made_from = (Kind.PARAM, Kind.PARAM_GRAD, Kind.MAIN_GRAD)
            before = [t.at(kind, slot="") for kind in made_from if (t.step, kind) in self._kinds]
            return not any(other in self._wrong and other not in self._replaced for other in before)
        return True

    def _is_wrong(self, kind: Kind, t: TensorId) -> bool:
        """Whether this kind is wrong at the tensor's module in the same step and, if known, microbatch and call."""
        microbatches = (_ANY,) if t.microbatch is None else (None, t.microbatch)
        call = _ANY if t.kind.is_of_param or t.kind.is_of_buffer else t.call
        return any((self.module_of(t), kind, t.step, microbatch, call) in self._at for microbatch in microbatches)

    def _is_made_by_wrong(self, t: TensorId) -> bool:
        """Whether a replaced tensor arrived from modules that are wrong, inside the module around it."""
        made_from = (Kind.OUTPUT,) if t.kind is Kind.INPUT else (Kind.OUTPUT, Kind.LOSS, Kind.GRAD_INPUT)
        then = itertools.product(made_from, (None, t.microbatch))
        return any((self.module_of(t), kind, t.step, microbatch) in self._wrong_inside for kind, microbatch in then)

    def _explains(self, origin: TensorId, t: TensorId) -> bool:
        """Whether a wrong tensor follows from an origin: it is inside the origin's module, in the same phase."""
        is_same_phase = origin.kind is not Kind.LOSS and _find_phase(origin) is _find_phase(t)
        return is_same_phase and is_inside(self.module_of(t), self.module_of(origin))

    def _has_inner_start(self, t: TensorId, around: set[tuple[str, Phase]]) -> bool:
        """Whether a module inside this one is wrong by itself in the same phase; `around` has all modules around such.

        In isolation the phases before count too: a wrong forward of an inner module does not reach this module's
        forward, because its inputs are replaced, but it does reach its backward.
        """
        module, phase = self.module_of(t), _find_phase(t)
        phases = _IN_ORDER[: _IN_ORDER.index(phase) + 1] if self._replaced else (phase,)
        return t.kind in _MADE_INSIDE and any((module, phase) in around for phase in phases)


def _find_phase(t: TensorId) -> Phase:
    # A loss inside the model is only known when its gradient arrives.
    return Phase.BACKWARD if t.kind is Kind.LOSS and t.name != ROOT else t.kind.phase


def find_source(module: str, candidate: Trace) -> str:
    """Find the file and line of a module; for torch's own layers, those of the module around them."""
    while True:
        for rank in candidate.ranks:
            info = rank.manifest.modules.get(module)
            if info is not None and info.source and not info.type.startswith("torch."):
                return info.source
        if module == ROOT:
            return ""
        module = module.rpartition(".")[0] or ROOT


def _find_all_wrong(first: TensorId, comparisons: Sequence[Comparison]) -> list[Comparison] | None:
    """Find all wrong gradients of the step; None if a final gradient is right, or something is wrong before them."""
    then = [c for c in comparisons if c.id.step == first.step and c.id.kind not in _AFTER_GRADIENTS]
    if any(c.verdict.is_wrong and c.id.kind not in _GRADIENTS for c in then):
        return None
    here = [c for c in then if c.id.kind is first.kind]
    if any(c.verdict is Verdict.PASS and c.id.microbatch is None and c.stats.aa > 0.0 for c in here):
        return None
    return [c for c in here if c.verdict.is_wrong]


def _have_one_factor(wrong: Sequence[Comparison]) -> bool:
    """Whether one number times the reference explains all of them."""
    factor = wrong[0].stats.scale
    return all(_measure_rest(c, factor) <= MOST_TOLERANCES * _tolerance(c) * max(abs(factor), 1.0) for c in wrong)


def _measure_rest(comparison: Comparison, factor: float) -> float:
    """Measure the error against the reference times this factor."""
    s = comparison.stats
    return math.sqrt(max(s.bb - 2 * factor * s.ab + factor * factor * s.aa, 0.0) / s.aa) if s.aa else math.inf


def _tolerance(comparison: Comparison) -> float:
    return comparison.tolerance.value if comparison.tolerance is not None else 0.0
