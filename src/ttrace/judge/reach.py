"""Reach of a check: the errors that it could have found, the parameters in which it could not, and what never ran.

A pass is worth what it could have failed on. All of this follows from tolerances, norms and facts that are recorded
already; `selftest.py` tests it with known faults.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from ttrace.judge.verdict import Comparison, Reach, Untested, Verdict, Weakness
from ttrace.layouts.ids import Kind, TensorId
from ttrace.trace.format import Record
from ttrace.trace.reader import Shard, Trace
from ttrace.values.generate import Integers, Rows

_SMALL = 1 / 64
"""An error of this size, relative to a gradient, is expected to be found. Chosen, not measured."""
_WIDER = 4.0
"""How many times wider than the median the tolerance of a weak parameter is, where no tolerance is small (bfloat16).

Chosen, not measured. It decides only which parameters the report names, and which it counts into the error.
"""
_GRADIENTS = (Kind.PARAM_GRAD, Kind.MAIN_GRAD)
_LABEL_NAMES = ("label", "target")


def measure_reach(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> Reach:
    """Measure what a check could have found."""
    is_trained = any(c.id.kind.is_of_param and c.id.kind is not Kind.PARAM for c in comparisons)
    weak = find_blind_spots(comparisons, candidate) if is_trained else {}
    errors: dict[str, float] = {}
    for comparison in comparisons:
        is_gradient = comparison.id.kind in _GRADIENTS and comparison.id.microbatch is None
        is_weak = weak.get(comparison.id.name) is Weakness.NO_GRADIENT
        if is_gradient and not is_weak and (error := comparison.detectable_error) is not None:
            errors[comparison.id.name] = min(error, errors.get(comparison.id.name, error))
    # Where only the update was judged, a fault in the gradient may show, but nothing says how large it must be.
    updated = [c.id.name for c in comparisons if c.id.kind is Kind.UPDATE and c.stats.aa > 0.0]
    weak = {name: Weakness.NO_GRADIENT for name in updated if name not in errors} | weak
    limit = max(_SMALL, _WIDER * statistics.median(errors.values())) if errors else 0.0
    wide = {name: Weakness.WIDE_TOLERANCE for name, error in errors.items() if error > limit}
    error = max((error for name, error in errors.items() if name not in wide), default=None)
    # A parameter whose update is not tested either keeps that reason: it is the more serious one.
    return Reach(error, {**wide, **weak}, tuple(_find_untested(comparisons, reference, candidate)))


def find_blind_spots(
    comparisons: Iterable[Comparison], candidate: Trace, blind: AbstractSet[TensorId] = frozenset()
) -> dict[str, Weakness]:
    """Find the trained parameters in which even the loss of a whole gradient or update would not have been found.

    `blind` are tensors that are known to reveal nothing.
    """
    trained = {name for rank in candidate.ranks for name, is_trained in rank.manifest.parameters.items() if is_trained}
    of_parameter: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.id.name in trained and comparison.id.microbatch is None:
            of_parameter.setdefault(comparison.id.name, []).append(comparison)
    found = {name: _find_weakness(mine, blind) for name, mine in of_parameter.items()}
    return {name: weakness for name, weakness in found.items() if weakness is not None}


def _find_weakness(comparisons: Iterable[Comparison], blind: AbstractSet[TensorId]) -> Weakness | None:
    """Find what is not tested of a parameter; None if its gradient and its update are.

    An update alone tests a gradient that was not judged. It does not if the gradient is zero: it is weight decay then.
    """
    gradients = [c for c in comparisons if c.id.kind in _GRADIENTS]
    has_update = any(c.id.kind is Kind.UPDATE and _has_power(c) and c.id not in blind for c in comparisons)
    if any(_has_power(gradient) and gradient.id not in blind for gradient in gradients):
        return None if has_update else Weakness.NO_UPDATE
    is_decay = any(_is_judged(c) or (c.tolerance is not None and c.tolerance.is_proven_zero) for c in gradients)
    return None if has_update and not is_decay else Weakness.NO_GRADIENT


def _has_power(comparison: Comparison) -> bool:
    """Whether the check would see the loss of the whole tensor; not if it is zero but for rounding."""
    tolerance = comparison.tolerance
    if tolerance is None or tolerance.size:
        return False
    return _is_judged(comparison) and comparison.stats.aa > 0.0 and tolerance.value < 1.0


def _is_judged(comparison: Comparison) -> bool:
    return comparison.verdict is Verdict.PASS or comparison.verdict.is_wrong


def _find_untested(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> Iterator[Untested]:
    """Yield what this run could have tested, in the order of `Untested`, as far as the traces show it."""
    steps = {c.id.step for c in comparisons if c.id.kind in (*_GRADIENTS, Kind.UPDATE)}
    if len(steps) == 1:
        yield Untested.LATER_STEPS
        if candidate.is_scheduled:
            yield Untested.SCHEDULE
    if candidate.settings and all(each.get("lr") == "0" for many in candidate.settings.values() for each in many):
        yield Untested.LEARNING_RATE_ZERO
    clips = [c for c in comparisons if c.id.kind is Kind.CLIP]
    if steps and all(clip.stats.aa >= 1.0 for clip in clips):  # the factor is 1 below the threshold
        yield Untested.CLIPPING_NOT_REACHED if clips else Untested.NO_CLIPPING
    yield from _find_untested_data(comparisons, reference)
    if reference.dropout or candidate.dropout:
        yield Untested.DROPOUT
    if any(
        c.id.kind is Kind.BATCH and _first(reference, c.id).values is not None for c in _known(comparisons, reference)
    ):
        yield Untested.OWN_DATA


def _find_untested_data(comparisons: Sequence[Comparison], reference: Trace) -> Iterator[Untested]:
    """Look for ignored labels and for masks in the data, or in what enters the model if no batch was recorded."""
    data = [c for c in _known(comparisons, reference) if c.id.is_data]
    batches = [c for c in data if c.id.kind is Kind.BATCH] or data
    slots: dict[str, list[Comparison]] = {}
    for comparison in batches:
        slots.setdefault(f"{comparison.id.name}.{comparison.id.site.slot}", []).append(comparison)
    masks = {slot for slot, mine in slots.items() if all(_is_constant_mask(c, reference) for c in mine)}
    tokens = {slot: mine for slot, mine in slots.items() if slot not in masks and _is_of_tokens(mine[0], reference)}
    has_labels = any(name in slot.lower() for slot in tokens for name in _LABEL_NAMES) or len(tokens) > 1
    if has_labels and not any(
        _has_ignored(s) for mine in tokens.values() for c in mine for s in reference.shards[c.id]
    ):
        yield Untested.IGNORED_LABELS
    if masks:
        yield Untested.MASKS


def _known(comparisons: Iterable[Comparison], reference: Trace) -> Iterator[Comparison]:
    return (comparison for comparison in comparisons if comparison.id in reference.shards)


def _first(reference: Trace, tensor_id: TensorId) -> Record:
    return reference.shards[tensor_id][0].record


def _is_constant_mask(comparison: Comparison, reference: Trace) -> bool:
    """Whether all elements are one, or all booleans are false; `aa` is the sum of the elements' squares."""
    stats, dtype = comparison.stats, _first(reference, comparison.id).dtype
    return stats.count > 1 and (stats.aa == stats.count or (stats.aa == 0.0 and not dtype.is_signed))


def _is_of_tokens(comparison: Comparison, reference: Trace) -> bool:
    """Whether this is an integer for each token: the labels of whole rows are not ignored in general."""
    record = _first(reference, comparison.id)
    return record.dtype.is_signed and not record.dtype.is_floating_point and len(record.shape) > 1


def _has_ignored(shard: Shard) -> bool:
    """Whether some labels are negative, such as -100; true if that is not known."""
    values = shard.record.values
    if isinstance(values, (Integers, Rows)):
        return values.keep < 1.0
    return not shard.record.has_values or bool((shard.tensor() < 0).any())
