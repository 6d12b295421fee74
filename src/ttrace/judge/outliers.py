"""Twins that are far from the others in a single tensor.

Every twin is nudged by as much as the others, so they stray about as far. One that is orders of magnitude further off
may have crossed a kink, a ReLU's for instance; then what was made from there is off, too. One that is off in a single
tensor, with nothing around it, was damaged: the tolerance that it gives would hide any bug in that tensor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from ttrace.judge.lost import is_of_update
from ttrace.judge.tolerance import TINY
from ttrace.judge.twins import Twins
from ttrace.tensors.ids import Kind, TensorId, is_inside
from ttrace.values.stats import Stats

FAR = 1e3
"""How many times further off than the others a twin must be."""
_LEAST = 1e-3
"""Errors below this hide little, whatever made them."""


def name_outlying_twins(rounding: Twins) -> Iterator[str]:
    """In words, each twin that is far off in a tensor where nothing else is."""
    found: dict[int, list[TensorId]] = {}
    for tensor_id, stats in rounding.stats.items():
        twin = _outlier(tensor_id, stats, rounding) if len(stats) == len(rounding.twins) else None
        if twin is not None:
            found.setdefault(twin, []).append(tensor_id)
    for twin, ids in sorted(found.items()):
        alone = [t for t in ids if not any(_is_beside(other, t) for other in ids)]
        if alone:
            errors = [s.error for s in rounding.stats[alone[0]]]
            others = max(error for number, error in enumerate(errors) if number != twin)
            more = f" The same holds for {len(alone) - 1} more tensors of this twin." if len(alone) > 1 else ""
            yield (
                f"{rounding.twins[twin].folder}: {alone[0]} is {errors[twin]:.1e} from the reference, where the other "
                f"twins are at most {others:.1e} from it, and nothing beside it is. This twin's trace is damaged, or "
                f"its run went wrong. Trace it again.{more}"
            )


def _outlier(tensor_id: TensorId, stats: Sequence[Stats], rounding: Twins) -> int | None:
    """The twin that is far beyond all others here."""
    tolerance = rounding.tolerances.get(tensor_id)
    # A step may turn single elements around, in one twin and not in another.
    is_stepped = tensor_id.kind is Kind.OPTIM or is_of_update(tensor_id)
    is_known = len(stats) > 2 or (len(stats) == 2 and stats[0].count >= TINY)
    if tolerance is None or is_stepped or not is_known or tolerance.floor == 0.0:
        return None
    errors = [s.error for s in stats]
    worst = max(range(len(errors)), key=errors.__getitem__)
    others = statistics.median(error for number, error in enumerate(errors) if number != worst)
    is_far = errors[worst] >= max(FAR * max(others, tolerance.floor), _LEAST)
    is_size_known = stats[worst].aa > 0.0 or not stats[worst].finite_b
    return worst if is_far and is_size_known and math.isfinite(others) else None


def _is_beside(other: TensorId, tensor_id: TensorId) -> bool:
    """Whether this is of another name inside the module around a tensor's own, in the same step."""
    module = tensor_id.name.rpartition(".")[0] if tensor_id.kind.is_of_param else tensor_id.name
    around = module.rpartition(".")[0]
    is_another = other.name != tensor_id.name and other.step == tensor_id.step
    return is_another and (not around or is_inside(other.name, around))
