"""This module says where something starts to be wrong.

Order is the reference's order of appearance, backward included. An origin is a wrong site whose module got right inputs
(in backward: a right incoming gradient). The innermost module wins; a module that is wrong while everything inside it
follows from wrong inputs is wrong in its own code. Every origin is a finding of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ttrace.judge.diagnose import cause
from ttrace.judge.verdict import Comparison, Finding
from ttrace.tensors.ids import ROOT, Kind, TensorId
from ttrace.trace.reader import Trace

_NEEDS: dict[Kind, tuple[Kind, ...]] = {
    Kind.OUTPUT: (Kind.INPUT,),
    Kind.GRAD_INPUT: (Kind.GRAD_OUTPUT, Kind.INPUT, Kind.OUTPUT),
    Kind.PARAM_GRAD: (Kind.GRAD_OUTPUT, Kind.INPUT, Kind.OUTPUT),
    Kind.LOSS: (Kind.OUTPUT,),
}
"""What must be right at the same module for a wrong site to be an origin."""


def findings(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> tuple[Finding, ...]:
    """One finding for every origin, first divergence first."""
    wrong = {comparison.id: comparison for comparison in comparisons if comparison.verdict.is_wrong}
    if not wrong:
        return ()
    sites = _WrongSites(list(wrong), _called(comparisons))
    order = list(wrong)
    return tuple(
        Finding(
            wrong[start],
            sites.module_of(start),
            _source(sites.module_of(start), candidate),
            cause(wrong[start], reference, candidate),
            num_after=len(order) - order.index(start) - 1,
        )
        for start in sites.origins()
    )


def _called(comparisons: Sequence[Comparison]) -> frozenset[str]:
    """The modules that ran: a module whose parameters its parent uses by itself never does."""
    return frozenset(c.id.name for c in comparisons if c.id.kind in (Kind.INPUT, Kind.OUTPUT))


class _WrongSites:
    """Which kinds are wrong at which module, by step and microbatch."""

    def __init__(self, wrong: list[TensorId], called: frozenset[str]) -> None:
        self._wrong_ids = wrong
        self._called = called
        self._first_step = min(t.step for t in wrong)
        self._at: set[tuple[str, Kind, int, int | None]] = set()
        for t in wrong:
            self._at.add((self.module_of(t), t.kind, t.step, t.microbatch))
            self._at.add((self.module_of(t), t.kind, t.step, None))

    def module_of(self, t: TensorId) -> str:
        """The module an id speaks of: for a parameter the innermost one around it that ran."""
        if not t.kind.is_of_param:
            return t.name
        module = t.name.rpartition(".")[0]
        while module and module not in self._called:
            module = module.rpartition(".")[0]
        return module or ROOT

    def origins(self) -> list[TensorId]:
        """The first wrong site of every module that is wrong by itself; never none."""
        starts = [t for t in self._wrong_ids if self.starts_at(t)]
        modules = {(self.module_of(t), t.step, t.kind.is_backward) for t in starts}
        first: dict[tuple[str, bool], TensorId] = {}
        for t in starts:
            if not self._has_inner(t, modules):
                # Other slots, calls and microbatches of the same module are the same story.
                first.setdefault((self.module_of(t), t.kind.is_backward), t)
        return list(first.values()) or self._wrong_ids[:1]

    def starts_at(self, t: TensorId) -> bool:
        """Whether everything this site is made from is right."""
        if t.step > self._first_step or t.kind in (Kind.PARAM, Kind.BATCH):
            return t.step == self._first_step
        module, microbatch = self.module_of(t), t.microbatch
        if any(self._wrong(module, kind, t.step, microbatch) for kind in _NEEDS.get(t.kind, ())):
            return False
        if t.kind is Kind.INPUT:
            return False  # an input is somebody's output, or made by the parent's own code
        if t.kind is Kind.GRAD_OUTPUT:
            return module == ROOT and not self._wrong(ROOT, Kind.LOSS, t.step, microbatch)
        if t.kind in (Kind.PARAM_AFTER, Kind.UPDATE):
            return not self._wrong(module, Kind.PARAM_GRAD, t.step, None)
        return not self._wrong(module, Kind.PARAM, t.step, None)

    def _wrong(self, module: str, kind: Kind, step: int, microbatch: int | None) -> bool:
        return (module, kind, step, microbatch) in self._at

    def _has_inner(self, t: TensorId, modules: set[tuple[str, int, bool]]) -> bool:
        """Whether a module inside this one is wrong by itself in the same direction."""
        module = self.module_of(t)
        prefix = "" if module == ROOT else f"{module}."
        return any(
            inner not in (module, ROOT) and inner.startswith(prefix) and (step, back) == (t.step, t.kind.is_backward)
            for inner, step, back in modules
        )


def _source(module: str, candidate: Trace) -> str:
    for rank in candidate.ranks:
        info = rank.manifest.modules.get(module)
        if info is not None:
            return info.source
    return ""
