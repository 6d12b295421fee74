"""Twins that are far from the others in a single tensor.

Every twin is nudged by the same amount, so the errors of all twins are similar. A twin with an error that is orders of
magnitude larger may have crossed a kink, as a ReLU or a cast to float8 has; then the tensors that follow have larger
errors too. A twin with such an error in one tensor alone is damaged: its tolerance would hide any bug in that tensor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.tolerance.twins import TINY
from ttrace.layouts.ids import Kind, TensorId, is_inside
from ttrace.values.stats import Stats

OUTLYING = 1e3
"""How many times further off than the others a twin must be."""
KINKED = 30.0
"""How many times further off it is around there, if it crossed a kink.

A float8 cast in one twin of a float32 model made one gradient 7,000 times as uncertain as the others say, those next to
it 1,000 times, and all that followed 30 to 100 times.
"""
_LEAST = 1e-3
"""Errors below this hide little, whatever made them."""


def describe_outlying_twins(rounding: ToleranceModel) -> Iterator[str]:
    """Say which twins are far off in a tensor while nothing near it is."""
    strayed: dict[int, dict[TensorId, float]] = {}
    for tensor_id, stats in rounding.stats.items():
        if len(stats) == len(rounding.twins) and _is_comparable(tensor_id, stats, rounding):
            twin, excess = _find_worst(tensor_id, stats, rounding)
            if excess >= KINKED:
                strayed.setdefault(twin, {})[tensor_id] = excess
    for twin, excesses in sorted(strayed.items()):
        far = [t for t in excesses if excesses[t] >= OUTLYING and rounding.stats[t][twin].error >= _LEAST]
        around = [t for t in excesses if rounding.stats[t][twin].count >= TINY]  # small ones stray by chance
        alone = [t for t in far if not any(_is_beside(other, t) for other in around)]
        if alone:
            errors = [s.error for s in rounding.stats[alone[0]]]
            others = max(error for number, error in enumerate(errors) if number != twin)
            more = f" The same holds for {len(alone) - 1} more tensors of this twin." if len(alone) > 1 else ""
            yield (
                f"{rounding.twins[twin].folder}: {alone[0]} is {errors[twin]:.1e} from the reference, where the other "
                f"twins are at most {others:.1e} from it, and nothing beside it is. This twin's trace is damaged, or "
                f"its run went wrong. Trace it again.{more}"
            )


def _is_comparable(tensor_id: TensorId, stats: Sequence[Stats], rounding: ToleranceModel) -> bool:
    """Whether twins stray about as far here. A step may turn single elements around, in one twin and not in another."""
    is_stepped = tensor_id.kind is Kind.OPTIM or tensor_id.is_of_update
    is_known = len(stats) > 2 or (len(stats) == 2 and stats[0].count >= TINY)
    tolerance = rounding.tolerances.get(tensor_id)
    return tolerance is not None and tolerance.floor > 0.0 and is_known and not is_stepped


def _find_worst(tensor_id: TensorId, stats: Sequence[Stats], rounding: ToleranceModel) -> tuple[int, float]:
    """The twin that is furthest off, and how many times as far as the others are."""
    errors = [s.error for s in stats]
    worst = max(range(len(errors)), key=errors.__getitem__)
    others = statistics.median(error for number, error in enumerate(errors) if number != worst)
    is_size_known = stats[worst].aa > 0.0 or not stats[worst].finite_b
    if not is_size_known or math.isinf(others):
        return worst, 0.0
    return worst, errors[worst] / max(others, rounding.tolerances[tensor_id].floor)


def _is_beside(other: TensorId, tensor_id: TensorId) -> bool:
    """Whether this is of another name inside the module around a tensor's own, in the same step."""
    module = tensor_id.name.rpartition(".")[0] if tensor_id.kind.is_of_param else tensor_id.name
    around = module.rpartition(".")[0]
    is_another = other.name != tensor_id.name and other.step == tensor_id.step
    return is_another and (not around or is_inside(other.name, around))
