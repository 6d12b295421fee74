"""Notes on what the ledger of collectives shows without a reference. They are evidence, and never a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ttrace.judge.communication import Communication
from ttrace.layouts.ids import Kind, TensorId, drop_layers
from ttrace.trace.collectives import Collective, Phase
from ttrace.trace.reader import Trace

_LEAST_LAYERS = 4
"""With fewer layers there are too few inner ones to say what is usual."""
_COMPARED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_MOST_NOTES = 3


def note_communication(candidate: Trace) -> list[str]:
    """Note ranks of one group that issue different sequences, messages that nobody receives, and unlike layers."""
    communication = Communication(candidate)
    if communication.is_empty:
        return []
    notes = [
        *_note_sequences(communication, candidate),
        *_note_messages(communication),
        *_note_layers(communication, candidate),
    ]
    return notes[:_MOST_NOTES]


def _note_sequences(communication: Communication, candidate: Trace) -> Iterator[str]:
    """Compare what the ranks of each group issued, in order."""
    found: dict[tuple[int, ...], dict[int, list[Collective]]] = {}
    for rank, entries in communication.by_rank.items():
        for one in entries:
            if not one.is_message:
                ranks = one.group.list_ranks(candidate.mesh, rank)
                found.setdefault(ranks, {}).setdefault(rank, []).append(one)
    for ranks, by_rank in found.items():
        first = min(by_rank)
        for other in ranks:
            ours, theirs = by_rank[first], by_rank.get(other, [])
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a.what != b.what), None)
            if at is not None:
                yield (
                    f"ranks {first} and {other} issue different collectives over {ours[at].group}: number {at + 1} is "
                    f"{ours[at]} of {list(ours[at].shape)} {ours[at].dtype} on rank {first}, and {theirs[at]} of "
                    f"{list(theirs[at].shape)} {theirs[at].dtype} on rank {other}"
                )
                break
            if len(ours) != len(theirs):
                yield (
                    f"rank {first} issues {len(ours)} collectives over {ours[0].group}, and rank {other} issues "
                    f"{len(theirs)}"
                )
                break


def _note_messages(communication: Communication) -> Iterator[str]:
    """Compare what each rank sends to another with what that one receives from it."""
    sent: dict[tuple[int, int], Counter[tuple[int, str]]] = {}
    received: dict[tuple[int, int], Counter[tuple[int, str]]] = {}
    for rank, entries in communication.by_rank.items():
        for one in entries:
            if one.is_message and one.peer is None:
                return  # it receives from anyone
            if one.is_message and one.peer is not None:
                pair, into = ((rank, one.peer), sent) if one.op == "send" else ((one.peer, rank), received)
                into.setdefault(pair, Counter())[one.num_bytes, one.dtype] += 1
    for pair in sorted(sent.keys() | received.keys()):
        ours, theirs = sent.get(pair, Counter()), received.get(pair, Counter())
        if ours != theirs:
            yield (
                f"rank {pair[0]} sends {ours.total()} messages to rank {pair[1]}, which receives {theirs.total()} from "
                "it, or of another size or dtype"
            )


def _note_layers(communication: Communication, candidate: Trace) -> Iterator[str]:
    """Compare what the layers of one stack issue in the modules that stand in the same place.

    The first and the last layer may differ for good reasons: nothing needs the gradient of the model's input, and the
    loss may need another layout. So only inner layers are compared.
    """
    stacks: dict[str, list[str]] = {}
    for name in communication.modules:
        if drop_layers(name) != name:
            stacks.setdefault(drop_layers(name), []).append(name)
    for stack in stacks.values():
        names = sorted(stack, key=_list_numbers)
        inner = names[1:-1]
        if len(names) < _LEAST_LAYERS or len({communication.modules[name] for name in names}) > 1:
            continue
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            usual = {name: _summarize(communication.list_of(name, phase)) for name in inner}
            common, count = Counter(usual.values()).most_common(1)[0]
            odd = [name for name, issued in usual.items() if issued != common]
            if odd and count > len(inner) / 2 and all(_ran(candidate, name, phase) for name in odd):
                like = next(name for name, issued in usual.items() if issued == common)
                yield (
                    f"in the {phase.value} of {_join(odd)}, {_describe(usual[odd[0]])}; in that of {like} and "
                    f"{count - 1} more, {_describe(common)}"
                )


def _list_numbers(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _ran(candidate: Trace, name: str, phase: Phase) -> bool:
    """Whether the module has such a pass at all: a part of the model may be frozen."""
    kind = Kind.OUTPUT if phase is Phase.FORWARD else Kind.GRAD_INPUT
    return TensorId.of(0, 0, name, kind) in candidate.shards


def _summarize(found: Sequence[Collective]) -> tuple[tuple[str, str], ...]:
    """Summarize what a module issued itself in one microbatch, without what torch does to shard parameters."""
    own = [one for one in found if one.op in _COMPARED and one.issuer in ("", "DTensor")]
    first = [one for one in own if (one.step, one.microbatch) == (own[0].step, own[0].microbatch)]
    return tuple((one.op, str(one.group)) for one in first)


def _describe(issued: tuple[tuple[str, str], ...]) -> str:
    if not issued:
        return "nothing is communicated"
    words = [
        f"{op} over {group}{f' ({count} times)' if count > 1 else ''}" for (op, group), count in Counter(issued).items()
    ]
    return f"{' and '.join(words)} {'runs' if len(words) == 1 else 'run'}"


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
