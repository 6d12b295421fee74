"""What generated values hide: the parameters' own initial values, and gradients that an earlier step left.

Generated values replace the parameters' own on both sides, so a comparison of tensors shows nothing of these. The
traces have sums of the own values of each rank, and the names of stale gradients.

- *Replicas* must be equal, bit for bit, where their replication is stated. A replication that is inferred from shapes
  is no evidence. Between stages of a pipeline there are other rules. After a first step that nothing watched, only axes
  over which gradients are reduced count: along the others rounding may differ.
- *Shards* of one tensor must not be equal, bit for bit, unless parts of the reference are.
- *Spreads*: a layer that computes its fan-in from its own shard starts with a standard deviation that is too large by
  the root of the number of shards. In three parameters or more, this is no accident, if unsharded ones agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ttrace.judge.reason import Reason, Why
from ttrace.judge.verdict import Cause, CauseName, Comparison, HiddenDifference
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.placement import LayoutSource
from ttrace.layouts.region import Region
from ttrace.trace.format import InitialValues
from ttrace.trace.reader import Shard, Trace

_STATED = frozenset(
    {
        LayoutSource.DTENSOR,
        LayoutSource.SPMD_TYPES,
        LayoutSource.HOLDS,
        LayoutSource.RULE,
        LayoutSource.ADAPTER,
        LayoutSource.UNCUT_MESH,
    }
)
"""The sources of layouts that state a replication."""
_PIPELINE = "pp"
_LEAST_EQUAL = 16
"""Shards with fewer elements may be equal by chance."""
_LEAST_SCALED = 3
"""So many parameters with a spread of the root of the shard factor are no accident."""
_LEAST_MEASURED = 400
"""Of fewer elements the spread is not known well enough: of these, to 3.5% (one sigma of normal numbers)."""
_SPREAD_LIMIT = 0.14
"""Spreads agree within four sigma of 400 elements; the root of the smallest shard factor is 1.41."""


def find_replaced_values(
    by_id: Mapping[TensorId, Comparison], reference: Trace, candidate: Trace
) -> Iterator[HiddenDifference]:
    """Find what was wrong before the first step, although generated values replaced it."""
    parameters = [_Parameter(*each) for each in _list_initial(candidate)]
    whole = {name: own for rank in reference.ranks[:1] if rank.end for name, own in rank.end.initial.items()}
    if reference.manifest.num_ranks > 1:
        whole = {}  # a shard does not show the whole
    # After a real step, replicas also differ because of wrong gradients, which are findings of their own.
    is_spoilt = candidate.manifest.attachment is not None and any(
        own.kind.is_of_param and comparison.verdict.is_wrong for own, comparison in by_id.items()
    )
    found = (
        *(() if is_spoilt else _find_own_replicas(parameters, candidate)),
        *_find_equal_shards(parameters, whole, candidate),
        *_find_fan_in(parameters, whole),
        *_find_stale(reference, candidate),
    )
    return ((own, why) for own, why in found if own in by_id)


def describe_replaced(why: Why, ids: Sequence[TensorId]) -> Cause:
    """Make the cause of differences that these parameters or gradients stand for."""
    axis = why.names[0] if why.names else None
    names = _name_some([own.name for own in ids])
    match why.reason:
        case Reason.NOT_BROADCAST:
            words = f"each rank of {axis} has its own initial values of {names}: nothing has broadcast them"
            return Cause(CauseName.NOT_BROADCAST, words, axis)
        case Reason.SAME_SEED:
            words = (
                f"the ranks of {axis} have the same initial values in their parts of {names}: were they drawn with one "
                "seed?"
            )
            return Cause(CauseName.SAME_SEED, words, axis)
        case Reason.SHARD_FAN_IN:
            words = (
                f"the initial values of {names} spread {why.value:.2f} x as widely as in the reference, the root of "
                "the number of shards: was the fan-in taken from a shard?"
            )
            return Cause(CauseName.SHARD_FAN_IN, words)
        case _:
            words = (
                f"before the step, the gradients of {names} were not zero, as they are in the reference: is zero_grad "
                "missing?"
            )
            return Cause(CauseName.STALE_GRADIENTS, words)


def note_stale_gradients(reference: Trace) -> Iterator[str]:
    """Note gradients that were stale, but not because of the candidate."""
    stale = _collect_stale(reference) or set()
    if stale:
        yield (
            f"{_name_some(sorted(stale))}: gradients of the reference were not zero when the first backward pass of a "
            "step began. Is zero_grad missing?"
        )


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the candidate, with its shards of which the initial values are known."""

    id: TensorId
    shards: Sequence[tuple[Shard, InitialValues]]

    @property
    def is_sharded(self) -> bool:
        return not all(_region(shard).is_whole for shard, _ in self.shards)

    @property
    def is_stated(self) -> bool:
        return all(shard.record.source in _STATED for shard, _ in self.shards)

    def measure_std(self) -> tuple[float, int]:
        """Measure the standard deviation of all shards together; return it with the number of elements."""
        distinct = {_region(shard): own for shard, own in self.shards}
        count = sum(region.numel for region in distinct)
        mean = sum(region.numel * own.mean for region, own in distinct.items()) / count
        squares = sum(region.numel * (own.std**2 + (own.mean - mean) ** 2) for region, own in distinct.items())
        return math.sqrt(squares / count), count


def _region(shard: Shard) -> Region:
    assert shard.record.region is not None, "shards without a region are left out"
    return shard.record.region


def _list_initial(candidate: Trace) -> Iterator[tuple[TensorId, list[tuple[Shard, InitialValues]]]]:
    if candidate.manifest.num_ranks == 1:
        return
    for tensor_id, shards in candidate.shards.items():
        if tensor_id.kind is not Kind.PARAM or tensor_id.step != candidate.manifest.first_step:
            continue
        initial = [(s, s.rank.end.initial.get(tensor_id.name) if s.rank.end else None) for s in shards]
        known = [(s, own) for s, own in initial if own is not None and s.record.region is not None]
        if len(known) == len(shards) > 1 and all(_region(s).flat is None for s, _ in known):
            yield tensor_id, known


def _find_own_replicas(parameters: Sequence[_Parameter], candidate: Trace) -> Iterator[HiddenDifference]:
    """Find parameters whose replicas differ along an axis, which no broadcast has made equal."""
    if any(map(_is_broadcast, _list_collectives(candidate))):
        return  # it may have come after the values were read
    was_trained = candidate.manifest.attachment is not None
    for part in candidate.mesh.factorisations:
        for axis, size in part:
            if size == 1 or axis == _PIPELINE or (was_trained and axis not in candidate.reduced):
                continue
            others = [other for other, _ in part if other != axis]
            ids = [each.id for each in parameters if each.is_stated and _has_own_replicas(each, others)]
            yield from ((own, Why(Reason.NOT_BROADCAST, names=(axis,))) for own in ids)


def _has_own_replicas(parameter: _Parameter, others: Sequence[str]) -> bool:
    """Whether replicas differ on ranks that have the same place on these other axes."""
    held: dict[object, tuple[Shard, int]] = {}
    for shard, own in parameter.shards:
        key = (_region(shard), *(shard.coord[axis] for axis in others))
        first, crc = held.setdefault(key, (shard, own.crc))
        if crc != own.crc and first.record.dtype == shard.record.dtype:
            return all(map(_is_as_generated, (first, shard)))
    return False


def _is_as_generated(shard: Shard) -> bool:
    """Whether the step began with the generated values: what a script loads later replaces its own values too."""
    record = shard.record
    if record.values is None or not record.has_values:
        return record.values is not None
    return bool((shard.rank.generate(record) == shard.tensor()).all())


def _list_collectives(candidate: Trace) -> Iterator[tuple[str, str, str]]:
    for rank in candidate.ranks:
        for one in rank.collectives:
            yield one.op, one.dtype, one.issuer


def _is_broadcast(collective: tuple[str, str, str]) -> bool:
    """Whether this may have broadcast parameters; DDP broadcasts buffers, and scripts broadcast tokens."""
    op, dtype, issuer = collective
    return op == "broadcast" and "float" in dtype and issuer != "DDP"


def _find_equal_shards(
    parameters: Sequence[_Parameter], whole: Mapping[str, InitialValues], candidate: Trace
) -> Iterator[HiddenDifference]:
    """Find parameters of which two ranks hold different parts with the same values."""
    for parameter in parameters:
        own = whole.get(parameter.id.name)
        if own is None or own.repeats or own.is_constant or not parameter.is_stated:
            continue
        axis = _find_equal_axis(parameter, candidate)
        if axis is not None:
            yield parameter.id, Why(Reason.SAME_SEED, names=(axis,))


def _find_equal_axis(parameter: _Parameter, candidate: Trace) -> str | None:
    """Find the axis along which two different parts hold the same values."""
    first: dict[int, Shard] = {}
    for shard, own in parameter.shards:
        # A DTensor is divided by torch, and on a CPU torch draws the same numbers on every rank.
        if own.is_constant or _region(shard).numel < _LEAST_EQUAL or shard.record.source is LayoutSource.DTENSOR:
            continue
        other = first.setdefault(own.crc, shard)
        if _region(other) != _region(shard) and other.record.shape == shard.record.shape:
            return next((a for a in candidate.mesh.sizes if other.coord[a] != shard.coord[a] and a != _PIPELINE), None)
    return None


def _find_fan_in(parameters: Sequence[_Parameter], whole: Mapping[str, InitialValues]) -> Iterator[HiddenDifference]:
    """Find sharded parameters whose spread is too large by the root of the number of shards."""
    scaled: list[tuple[TensorId, float]] = []
    modules, agreeing, deviating = set(), 0, []
    for parameter in parameters:
        own, (std, count) = whole.get(parameter.id.name), parameter.measure_std()
        if own is None or own.is_constant or not std or count < _LEAST_MEASURED:
            continue
        shard, ratio = parameter.shards[0][0], std / own.std
        root = math.sqrt(math.prod(_region(shard).shape) / _region(shard).numel)
        if abs(ratio - 1.0) <= _SPREAD_LIMIT:
            agreeing += not parameter.is_sharded
        elif parameter.is_sharded and abs(ratio / root - 1.0) <= _SPREAD_LIMIT / 2:
            scaled.append((parameter.id, ratio))
            modules.add(parameter.id.name.rpartition(".")[0])
        elif not parameter.is_sharded:
            deviating.append(parameter.id.name.rpartition(".")[0])
    # The bias of such a layer is whole, and its spread follows from the same fan-in.
    if len(scaled) < _LEAST_SCALED or not agreeing or not modules.issuperset(deviating):
        return
    ratio = math.exp(sum(math.log(each) for _, each in scaled) / len(scaled))
    yield from ((own, Why(Reason.SHARD_FAN_IN, value=ratio)) for own, _ in scaled)


def _collect_stale(trace: Trace) -> set[str] | None:
    """Collect the parameters with stale gradients on some rank; None if no rank has observed a backward pass."""
    known = [rank.end.stale for rank in trace.ranks if rank.end and rank.end.stale is not None]
    return {name for names in known for name in names} if known else None


def _find_stale(reference: Trace, candidate: Trace) -> Iterator[HiddenDifference]:
    """Find gradients that only the candidate's earlier steps left.

    Scripts that attach by themselves may begin with another step than those that do not.
    """
    ours, theirs = _collect_stale(reference), _collect_stale(candidate)
    is_alike = (reference.manifest.attachment is None) is (candidate.manifest.attachment is None)
    if ours is None or not theirs or not is_alike or theirs <= ours:
        return
    names = [name for name in candidate.ranks[0].manifest.parameters if name in theirs - ours]
    names = names or sorted(theirs - ours)
    step = candidate.manifest.first_step
    why = Why(Reason.STALE_GRADIENT)
    yield from ((TensorId.of(step, None, name, Kind.PARAM_GRAD), why) for name in names)


def _name_some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
