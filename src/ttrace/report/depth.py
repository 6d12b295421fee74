"""Places of all tensors along the depth of a model, so that forward, backward and updates share one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttrace.judge.verdict import Comparison
from ttrace.layouts.ids import Kind, TensorId

_ENDS = (Kind.OUTPUT, Kind.INPUT)


@dataclass(frozen=True)
class Depth:
    """The place of each tensor: at its module's input or output, in the order of the reference's forward pass."""

    places: tuple[int, ...]
    """One for each comparison."""
    names: tuple[str, ...]
    """The module or parameter at each place."""

    @classmethod
    def of(cls, comparisons: Sequence[Comparison]) -> Depth:
        known: dict[tuple[str, Kind], int] = {}
        for comparison in comparisons:
            if comparison.id.kind in _ENDS:
                known.setdefault((comparison.id.name, comparison.id.kind), len(known))
        names = tuple(name for name, _ in known) or ("",)
        places, last = [], 0
        for comparison in comparisons:
            # A tensor that belongs to no module, such as a loss, gets the place of the tensor before it.
            last = _find_place(comparison.id, known, last)
            places.append(last)
        return cls(tuple(places), names)


def _find_place(tensor_id: TensorId, known: dict[tuple[str, Kind], int], last: int) -> int:
    name, kind = tensor_id.name, tensor_id.kind.primal
    if tensor_id.kind.is_of_param:
        name = name.rpartition(".")[0]
    for end in (kind, *_ENDS):
        if (name, end) in known:
            return known[name, end]
    return last
