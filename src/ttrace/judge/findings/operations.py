"""The first wrong operation inside each module of an isolated run, forward and backward.

In isolation the inputs of a module and the gradients of its outputs are right, so the first operation with a wrong
result, in the order of the pass, is wrong itself. A gradient is wrong because of the operation that used the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ttrace.judge.communication import Communication
from ttrace.judge.reason import Reason
from ttrace.judge.verdict import Comparison, WrongOperation
from ttrace.tensors.ids import Kind, TensorId, is_inside
from ttrace.trace.format import Operation
from ttrace.trace.lines.collectives import Collective, Phase
from ttrace.trace.reader import Trace

_INPUT = "input"
_MOST_LINES = 60
"""A backward with more lines than this is not searched for its collectives."""
Operations = Mapping[tuple[str, Phase], WrongOperation]
"""By module and pass."""


def find_operations(comparisons: Sequence[Comparison], candidate: Trace) -> dict[tuple[str, Phase], WrongOperation]:
    """Find the first wrong operation of each module whose operations were recorded."""
    known = {comparison.id: comparison for comparison in comparisons}
    communication = Communication(candidate)
    found: dict[tuple[str, Phase], WrongOperation] = {}
    for name, operations in candidate.operations.items():
        module = _Module(name, operations, known, communication)
        for phase, operation in ((Phase.FORWARD, module.find_forward()), (Phase.BACKWARD, module.find_backward())):
            if operation is not None:
                found[name, phase] = operation
    return found


@dataclass(frozen=True)
class _Module:
    """A module with the operations of its first call, in the order of the forward pass."""

    name: str
    operations: Sequence[Operation]
    known: Mapping[TensorId, Comparison]
    communication: Communication

    def find_forward(self) -> WrongOperation | None:
        """Find the first operation with a wrong result; if all are right, what made the wrong output of them."""
        for operation in self.operations:
            if self._is_wrong(operation, Kind.CALL):
                return self._name(self._find_unknown(operation) or operation)
        if not self._has_wrong(Kind.OUTPUT):
            return None
        # A sum that is still pending when the module ends.
        for operation in self.operations:
            comparison = self._look_up(operation, Kind.CALL)
            if comparison is not None and comparison.reason is Reason.PARTIAL_CALL:
                return self._name(operation)
        issued = self.communication.list_of(self.name, Phase.FORWARD)
        if issued:
            return WrongOperation(issued[-1].op, issued[-1].source, collective=issued[-1])
        return self._name(self.operations[-1]) if self.operations else None

    def find_backward(self) -> WrongOperation | None:
        """Find the operation that makes a wrong gradient of right ones."""
        for operation in reversed(self.operations):
            if self._is_wrong(operation, Kind.CALL_GRAD):
                return self._name_backward(self._find_user(operation.slot))
        if self._has_wrong(Kind.GRAD_INPUT):
            return self._name_backward(self._find_user(_INPUT))
        for parameter in self._list_wrong_parameters():
            return self._name_backward(self._find_user(parameter))
        return None

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
            if (
                tensor_id.kind is Kind.PARAM_GRAD
                and comparison.verdict.is_wrong
                and is_inside(tensor_id.name, self.name)
            ):
                yield tensor_id.name

    def _find_unknown(self, operation: Operation) -> Operation | None:
        """Find an operation that the reference does not have, and whose result this one takes, itself or as a view."""
        by_slot = {each.slot: each for each in self.operations}
        for taken in (by_slot[slot] for slot in reversed(operation.takes) if slot in by_slot):
            found = self._find_unknown(taken) if taken.is_view else taken
            if found is not None and self._look_up(found, Kind.CALL) is None:
                return found
        return None

    def _find_user(self, slot: str) -> Operation | None:
        """Find the last operation that takes this: its backward runs first."""
        return next((each for each in reversed(self.operations) if slot in each.takes), None)

    def _name(self, operation: Operation) -> WrongOperation:
        """Name an operation, or the collective that changed its result before it was used."""
        collective = self._find_collective(operation)
        if collective is not None:
            return WrongOperation(collective.op, collective.source, collective=collective)
        return WrongOperation(_name_function(operation), operation.source)

    def _find_collective(self, operation: Operation) -> Collective | None:
        orders = set(operation.collectives)
        ledger = next(filter(None, self.communication.by_rank.values()), ())
        return next((one for one in reversed(ledger) if one.order in orders), None)

    def _name_backward(self, operation: Operation | None) -> WrongOperation | None:
        """Name the backward of an operation, or the collective in it, if it is a custom function's."""
        if operation is None:
            return None
        if not operation.backward:
            return WrongOperation(_name_function(operation), operation.source, is_backward=True)
        for one in self.communication.list_of(self.name, Phase.BACKWARD):
            if _is_in_function(one.source, operation.backward):
                return WrongOperation(one.op, one.source, operation.source, one, is_backward=True)
        return WrongOperation(_name_function(operation), operation.backward, operation.source, is_backward=True)


def _name_function(operation: Operation) -> str:
    return operation.slot.rpartition(".")[0].removeprefix("own-")


def _is_in_function(source: str, definition: str) -> bool:
    """Whether a line is in the function that begins at another one."""
    file, _, line = source.rpartition(":")
    first_file, _, first = definition.rpartition(":")
    is_line = line.isdigit() and first.isdigit()
    return is_line and file == first_file and 0 <= int(line) - int(first) < _MOST_LINES
