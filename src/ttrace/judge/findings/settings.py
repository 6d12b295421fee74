"""Settings that differ between the sides: those of the optimizer for a parameter, and those of torch's modules.

The values of one step do not show all of them. Momentum acts from the second step on, a bfloat16 parameter rounds away
a learning rate that is 10% too large, and dropout is switched off. So settings are recorded and compared themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from ttrace.judge.causes.optimizer import compare_values, describe_settings, find_different_settings
from ttrace.judge.reason import DifferentSetting, Reason, Why
from ttrace.judge.verdict import Cause, CauseName, Comparison, HiddenDifference, Verdict
from ttrace.layouts.ids import Kind, TensorId
from ttrace.trace.format import INITIAL_RATE, NEXT_RATE, ModuleInfo
from ttrace.trace.reader import Trace

_OWN_CLASSES = ("torch.nn.", "torch.distributed.")
_Fact = TypeVar("_Fact")
_DROPOUT = ("p", "dropout")
"""The rates of dropout: at 0, training mode changes nothing."""
_OF_TRAINING = (*_DROPOUT, "momentum")
_MOST_NOTES = 3
_ABSENT = (Verdict.MISSING, Verdict.GAP)


def find_settings(
    by_id: Mapping[TensorId, Comparison], reference: Trace, candidate: Trace
) -> Iterator[HiddenDifference]:
    """Find the parameters and modules whose settings differ, and the parameters that no optimizer holds."""
    yield from _compare_parameters(by_id, reference, candidate)
    yield from _compare_modules(by_id, reference, candidate)


def describe_difference(why: Why, ids: Sequence[TensorId], candidate: Trace) -> Cause:
    """Make the cause of differences that these updates or outputs stand for."""
    names = [own.name for own in ids]
    if why.reason is Reason.NOT_HELD:
        words = f"the optimizer does not hold {_count(names, 'parameters')}: only the reference's optimizer does"
        return Cause(CauseName.NOT_UPDATED, words)
    if ids[0].kind is Kind.UPDATE:
        return describe_settings(names, why.settings)
    kind = _list_modules(candidate)[names[0]].type.rpartition(".")[2]
    words = ", ".join(map(str, why.settings))
    return Cause(CauseName.MODULE_SETTINGS, f"the settings of {kind} differ in {_count(names, 'modules')}: {words}")


def _count(names: Sequence[str], what: str) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} {what}"


def _compare_parameters(
    by_id: Mapping[TensorId, Comparison], reference: Trace, candidate: Trace
) -> Iterator[HiddenDifference]:
    end = candidate.ranks[0].end
    if end is None or not candidate.settings:
        return
    stateful = {own.name for own in candidate.shards if own.kind is Kind.OPTIM}
    for name in reference.settings:
        own = TensorId.of(max(end.num_steps - 1, 0), None, name, Kind.UPDATE)
        update, gradient = by_id.get(own), by_id.get(own.at(Kind.PARAM_GRAD))
        if update is not None and update.verdict in _ABSENT:
            continue
        if name in candidate.settings:
            found = find_different_settings(reference, candidate, name)
            if gradient is not None and gradient.verdict.is_wrong:
                found = tuple(each for each in found if each.name != "eps")  # it may be scaled like the gradient
            if found:
                yield own, Why(Reason.SETTINGS_DIFFER, settings=found)
        elif name not in stateful and _is_left_out(update, gradient):
            yield own, Why(Reason.NOT_HELD)


def _is_left_out(update: Comparison | None, gradient: Comparison | None) -> bool:
    """Whether a parameter has the right gradient, and no rank changes it."""
    has_gradient = gradient is not None and gradient.verdict is Verdict.PASS and gradient.stats.bb > 0.0
    return has_gradient and update is not None and update.stats.bb == 0.0


def _compare_modules(
    by_id: Mapping[TensorId, Comparison], reference: Trace, candidate: Trace
) -> Iterator[HiddenDifference]:
    """Compare the modules that both sides ran, by the first output of each."""
    ours, theirs = _list_modules(reference), _list_modules(candidate)
    evaluated = [_list_evaluated(trace) for trace in (reference, candidate)]
    ran: dict[str, TensorId] = {}
    for own, comparison in by_id.items():
        if own.kind is Kind.OUTPUT and comparison.verdict not in _ABSENT:
            ran.setdefault(own.name, own)
    # A side that only runs forward, such as a rollout, has no use for what acts in training.
    trains = any(own.kind is Kind.PARAM_GRAD and c.verdict not in _ABSENT for own, c in by_id.items())
    for name, own in ran.items():
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or not _find_class(a) or _find_class(a) != _find_class(b):
            continue
        keys = [key for key in a.settings if key in b.settings and (trains or key not in _OF_TRAINING)]
        found = [compare_values(key, {a.settings[key]}, {b.settings[key]}) for key in keys]
        if trains and _trains_differently(a) and _trains_differently(b):
            modes = [{str(name not in names)} for names in evaluated]
            found.append(compare_values("training", modes[0], modes[1]))
        settings = tuple(each for each in found if each is not None)
        if settings:
            yield own, Why(Reason.SETTINGS_DIFFER, settings=settings)


def _list_modules(trace: Trace) -> dict[str, ModuleInfo]:
    return _merge(rank.manifest.modules for rank in trace.ranks)


def _merge(tables: Iterable[Mapping[str, _Fact]]) -> dict[str, _Fact]:
    """Merge the tables of all ranks; thousands of ranks share few."""
    distinct = {id(table): table for table in tables}
    return {name: fact for table in distinct.values() for name, fact in table.items()}


def _list_evaluated(trace: Trace) -> frozenset[str]:
    return frozenset(name for rank in trace.ranks if rank.end for name in rank.end.evaluated)


def _find_class(info: ModuleInfo) -> str:
    """Find a module's class of torch; empty for a user's. Batch norms are alike, and FSDP2 makes its own classes."""
    if not info.type.startswith(_OWN_CLASSES):
        return ""
    name = info.type.rpartition(".")[2].removeprefix("FSDP")
    return "BatchNorm" if "BatchNorm" in name else name


def _trains_differently(info: ModuleInfo) -> bool:
    return "momentum" in info.settings or any(info.settings.get(key, "0") != "0" for key in _DROPOUT)


def note_settings(reference: Trace, candidate: Trace) -> list[str]:
    """Note differences that are no findings: learning rates of other steps, frozen parameters, dtypes, own numbers."""
    return [
        *_group("learning rates of other steps differ", _find_other_rates(reference, candidate)),
        *_group("frozen parameters differ", _find_frozen(reference, candidate)),
        *_group("dtypes of parameters differ", _find_dtypes(reference, candidate)),
        *_group("numbers of the model's own modules differ", _find_own_numbers(reference, candidate)),
    ]


def _group(what: str, found: Iterable[tuple[str, DifferentSetting | None]]) -> Iterator[str]:
    names: dict[DifferentSetting, list[str]] = {}
    for name, setting in found:
        if setting is not None:
            names.setdefault(setting, []).append(name)
    words = [
        f"{setting} for {each[0]}{f' and {len(each) - 1} more' if len(each) > 1 else ''}"
        for setting, each in names.items()
    ]
    if words:
        more = f", and {len(words) - _MOST_NOTES} more" if len(words) > _MOST_NOTES else ""
        yield f"{what}: {', '.join(words[:_MOST_NOTES])}{more}"


def _find_other_rates(reference: Trace, candidate: Trace) -> Iterator[tuple[str, DifferentSetting | None]]:
    for name, ours in reference.settings.items():
        sides = (ours, candidate.settings.get(name, ()))
        rates = [{key: {s[key] for s in side if key in s} for key in ("lr", INITIAL_RATE, NEXT_RATE)} for side in sides]
        if compare_values("lr", rates[0]["lr"], rates[1]["lr"]) is None:
            yield from ((name, compare_values(key, rates[0][key], rates[1][key])) for key in (INITIAL_RATE, NEXT_RATE))


def _find_frozen(reference: Trace, candidate: Trace) -> Iterator[tuple[str, DifferentSetting | None]]:
    ours, theirs = (_merge(rank.manifest.parameters for rank in side.ranks) for side in (reference, candidate))
    for name, is_trained in ours.items():
        if name in theirs:
            yield name, compare_values("requires_grad", {str(is_trained)}, {str(theirs[name])})


def _find_dtypes(reference: Trace, candidate: Trace) -> Iterator[tuple[str, DifferentSetting | None]]:
    for own, shards in reference.shards.items():
        if own.kind is Kind.PARAM and own in candidate.shards:
            ours, theirs = (
                {str(s.record.dtype).removeprefix("torch.") for s in t} for t in (shards, candidate.shards[own])
            )
            yield own.name, compare_values("dtype", ours, theirs)


def _find_own_numbers(reference: Trace, candidate: Trace) -> Iterator[tuple[str, DifferentSetting | None]]:
    ours, theirs = _list_modules(reference), _list_modules(candidate)
    for name, a in ours.items():
        b = theirs.get(name)
        if b is not None and a.type == b.type and not a.type.startswith(_OWN_CLASSES):
            both = a.settings.keys() & b.settings.keys()
            yield from ((name, compare_values(key, {a.settings[key]}, {b.settings[key]})) for key in sorted(both))
