"""The operations and collectives that findings name: the wrong one in isolation, and what the ledger shows.

In isolation the inputs of a module and the gradients of its outputs are right, so the first operation with a wrong
result, in the order of the phase, is wrong itself. A gradient is wrong because of the operation that used the tensor.
If a finding claims that a reduction is missing, doubled or over the wrong ranks, the ledger of collectives shows which
reductions ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ttrace.judge.communication import REDUCTIONS, Communication, LedgerEvidence, LedgerFact
from ttrace.judge.reason import Reason
from ttrace.judge.verdict import CauseName, Comparison, Finding, WrongOperation, WrongOperations
from ttrace.layouts.ids import Kind, Phase, TensorId, is_inside
from ttrace.trace.collectives import Collective
from ttrace.trace.format import Operation
from ttrace.trace.reader import Trace

_INPUT = "input"
_CONVERSIONS = frozenset({"to_local", "from_local"})
"""Functions that convert between DTensors and their local parts without changing values."""
_MISSING = (
    CauseName.MISSING_ALL_REDUCE,
    CauseName.MISSING_AVERAGE,
    CauseName.WRONG_GROUP,
    CauseName.PARTIAL_SUM,
)
_MOST_QUOTED = 2
K = TypeVar("K")
_MOST_LINES = 60
"""A backward with more lines than this is not searched for its collectives."""


def find_operations(comparisons: Sequence[Comparison], candidate: Trace) -> WrongOperations:
    """Find the first wrong operation of each module whose operations were recorded, and what changed gradients."""
    known = {comparison.id: comparison for comparison in comparisons}
    communication = Communication(candidate)
    modules = set(candidate.manifest.modules)
    in_modules: dict[tuple[str, Phase], WrongOperation | None] = {}
    changes: dict[str, WrongOperation | None] = {}
    left_out: dict[str, WrongOperation | None] = {}
    by_parameter = {name: operations for name, operations in candidate.operations.items() if name not in modules}
    for name in modules & set(candidate.operations):
        module = _Code(name, candidate.operations[name], known, communication)
        in_modules[name, Phase.FORWARD] = module.find_forward()
        in_modules[name, Phase.BACKWARD] = module.find_backward()
    for name in (tensor_id.name for tensor_id, comparison in known.items() if _is_wrong_gradient(comparison)):
        code = _Code(name, by_parameter.get(name, ()), known, communication)
        others = [one for other, operations in by_parameter.items() if other != name for one in operations]
        changes[name], left_out[name] = code.find_change(others), code.find_left_out(others)
    return WrongOperations(_drop_none(in_modules), _drop_none(changes), _drop_none(left_out))


def add_ledger(finding: Finding, communication: Communication) -> Finding:
    """Add which reductions the ledger shows to a finding about a reduction."""
    cause = finding.cause
    is_missing, is_double = cause.name in _MISSING, cause.name is CauseName.DOUBLE_REDUCTION
    if communication.is_empty or not (is_missing or is_double):
        return finding
    evidence = _look_up(finding, communication)
    if is_double:
        if evidence.fact is not LedgerFact.RAN:
            return finding  # without a reduction here, the ledger does not support a double one
        evidence = replace(evidence, fact=LedgerFact.TOO_OFTEN)
    return replace(finding, ledger=evidence)


def _is_wrong_gradient(comparison: Comparison) -> bool:
    return comparison.id.kind is Kind.PARAM_GRAD and comparison.verdict.is_wrong


def _drop_none(operations: Mapping[K, WrongOperation | None]) -> dict[K, WrongOperation]:
    return {key: operation for key, operation in operations.items() if operation is not None}


@dataclass(frozen=True)
class _Code:
    """A module with the operations of its first call, in order, or a parameter with those that change its gradient."""

    name: str
    operations: Sequence[Operation]
    known: Mapping[TensorId, Comparison]
    communication: Communication

    def find_forward(self) -> WrongOperation | None:
        """Find the first operation with a wrong result; if all are right, what made a wrong output from them."""
        for operation in self.operations:
            if self._is_wrong(operation, Kind.CALL):
                return self._name(self._find_unknown(operation) or operation)
        if self._has_wrong(Kind.LOSS) and self.operations:
            return self._name(self._find_unknown(self.operations[-1]) or self.operations[-1])
        if not self._has_wrong(Kind.OUTPUT):
            return None
        # A partial sum that is still pending when the module ends.
        for operation in self.operations:
            comparison = self._look_up(operation, Kind.CALL)
            if comparison is not None and comparison.reason is Reason.PARTIAL_CALL:
                return self._name(operation)
        issued = self.communication.list_of(self.name, Phase.FORWARD)
        if issued:
            return WrongOperation(issued[-1].op, issued[-1].source, collective=issued[-1])
        return self._name(self.operations[-1]) if self.operations else None

    def find_backward(self) -> WrongOperation | None:
        """Find the operation whose backward makes a wrong gradient from right ones."""
        for operation in reversed(self.operations):
            if self._is_wrong(operation, Kind.CALL_GRAD):
                return self._name_backward(self._find_user(operation.slot))
        if self._has_wrong(Kind.GRAD_INPUT):
            return self._name_backward(self._find_user(_INPUT))
        for parameter in self._list_wrong_parameters():
            return self._name_backward(self._find_user(parameter))
        return None

    def find_change(self, others: Sequence[Operation]) -> WrongOperation | None:
        """Find the last change that the script makes to this gradient alone, or else its last change."""
        usual = {_identify(operation) for operation in others}
        unusual = [operation for operation in self.operations if usual and _identify(operation) not in usual]
        own = unusual or self.operations
        return self._name(own[-1]) if own else None

    def find_left_out(self, others: Sequence[Operation]) -> WrongOperation | None:
        """Find a collective that other gradients go through, and this one does not."""
        own = {_identify(operation) for operation in self.operations}
        missing = (each for each in others if each.collectives and _identify(each) not in own)
        return next((replace(self._name(operation), is_left_out=True) for operation in missing), None)

    def _look_up(self, operation: Operation, kind: Kind) -> Comparison | None:
        return self.known.get(TensorId.of(0, 0, self.name, kind, slot=operation.slot))

    def _is_wrong(self, operation: Operation, kind: Kind) -> bool:
        comparison = self._look_up(operation, kind)
        return comparison is not None and comparison.verdict.is_wrong

    def _has_wrong(self, kind: Kind) -> bool:
        return any(
            comparison.verdict.is_wrong
            for tensor_id, comparison in self.known.items()
            if tensor_id.name == self.name and tensor_id.kind is kind
        )

    def _list_wrong_parameters(self) -> Iterator[str]:
        for tensor_id, comparison in self.known.items():
            if _is_wrong_gradient(comparison) and is_inside(tensor_id.name, self.name):
                yield tensor_id.name

    def _find_unknown(self, operation: Operation) -> Operation | None:
        """Find an operation that the reference does not have, and whose result this one takes directly or as a view."""
        by_slot = {each.slot: each for each in self.operations}
        for taken in (by_slot[slot] for slot in reversed(operation.takes) if slot in by_slot):
            is_passed_on = taken.is_view or _name_function(taken) in _CONVERSIONS
            origin = self._find_unknown(taken) if is_passed_on else taken
            if origin is not None and self._is_unknown(origin):
                return origin
        return None

    def _is_unknown(self, operation: Operation) -> bool:
        comparison = self._look_up(operation, Kind.CALL)
        return comparison is None or comparison.reason is Reason.NO_TENSOR

    def _find_user(self, slot: str) -> Operation | None:
        """Find the last operation that takes this tensor: its backward runs first."""
        return next((each for each in reversed(self.operations) if slot in each.takes), None)

    def _name(self, operation: Operation) -> WrongOperation:
        """Name an operation, or the collective that changed its result before it was used."""
        collective = self._find_collective(operation)
        if collective is None:
            return WrongOperation(_name_function(operation), operation.source)
        called_at = operation.source if operation.source != collective.source else ""
        return WrongOperation(collective.op, collective.source, called_at, collective)

    def _find_collective(self, operation: Operation) -> Collective | None:
        orders = set(operation.collectives)
        ledger = next(filter(None, self.communication.by_rank.values()), ())
        return next((one for one in reversed(ledger) if one.order in orders), None)

    def _name_backward(self, operation: Operation | None) -> WrongOperation | None:
        """Name the backward of an operation, or the collective in it if it is a custom autograd function's."""
        if operation is None:
            return None
        if operation.backward in ("", operation.source):
            return WrongOperation(_name_function(operation), operation.source, is_backward=True)
        for one in self.communication.list_of(self.name, Phase.BACKWARD):
            if _is_in_function(one.source, operation.backward):
                return WrongOperation(one.op, one.source, operation.source, one, is_backward=True)
        return WrongOperation(_name_function(operation), operation.backward, operation.source, is_backward=True)


def _identify(operation: Operation) -> tuple[str, str]:
    """Identify the same change in different gradients."""
    return operation.slot, operation.source


def _name_function(operation: Operation) -> str:
    return operation.slot.rpartition(".")[0].removeprefix("own-")


def _is_in_function(source: str, definition: str) -> bool:
    """Whether a line is in the function that is defined at another line."""
    file, _, line = source.rpartition(":")
    first_file, _, first = definition.rpartition(":")
    is_line = line.isdigit() and first.isdigit()
    return is_line and file == first_file and 0 <= int(line) - int(first) < _MOST_LINES


def _look_up(finding: Finding, communication: Communication) -> LedgerEvidence:
    """Look up the reductions over the finding's axis: in its module, in the same module of other layers, elsewhere."""
    kind, axis, module = finding.comparison.id.kind, finding.cause.axis or "", finding.module
    # Not kind.phase: whatever is wrong in a parameter's update was reduced in the backward.
    phase = Phase.BACKWARD if kind.is_backward or kind.is_of_param else Phase.FORWARD
    own = _keep_reductions(communication.list_inside(module, phase))
    if kind in (Kind.PARAM_GRAD, Kind.MAIN_GRAD):
        own += _keep_reductions(communication.list_outside((Phase.BACKWARD, Phase.OTHER)))
    over = [one for one in own if axis in one.group.axes or not axis]
    if over:
        return LedgerEvidence(LedgerFact.RAN, phase, axis, _keep_distinct(over))
    for name in communication.list_siblings(module):
        there = _keep_reductions(communication.list_inside(name, phase)) if name != module else []
        over = [one for one in there if axis in one.group.axes]
        if over:
            return LedgerEvidence(LedgerFact.IN_SIBLING, phase, axis, _keep_distinct(over))
    if own:
        return LedgerEvidence(LedgerFact.OTHER_GROUP, phase, axis, _keep_distinct(own))
    return LedgerEvidence(LedgerFact.ABSENT, phase, axis)


def _keep_reductions(collectives: list[Collective]) -> list[Collective]:
    return [one for one in collectives if one.op in REDUCTIONS]


def _keep_distinct(collectives: list[Collective]) -> tuple[Collective, ...]:
    """Keep the first of equal collectives that come from one line of code."""
    lines: dict[tuple[object, ...], Collective] = {}
    for one in collectives:
        lines.setdefault((one.op, one.group, one.source), one)
    return tuple(lines.values())[:_MOST_QUOTED]
