"""Notes of a check: on communication, attachment, environments, dropout and log-probabilities.

They are evidence and never change the verdict. Communication is compared within the candidate, without a reference:
ranks of one group, senders with receivers, and layers of one stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ttrace.judge.communication import Communication
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.verdict import Comparison
from ttrace.layouts.ids import Kind, Phase, TensorId, drop_layers
from ttrace.trace.collectives import Collective
from ttrace.trace.format import Attachment
from ttrace.trace.reader import Trace

_LEAST_LAYERS = 4
"""With fewer layers there are too few inner ones to know what is usual."""
_COMPARED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_MOST_NOTES = 3
_MOST_DIFFERENCES = 5
_LOG_PROBS = "logprobs"
"""The name of a module that returns log-probabilities."""
_MOST_TOKENS = 1 << 22
"""Log-probabilities of more tokens are not noted: they would have to be in memory at once."""


def note_communication(candidate: Trace) -> list[str]:
    """Note ranks of a group with different sequences, messages that are not received, and layers that differ."""
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
    """Compare what each rank sends to another rank with what the other rank receives from it."""
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
                "it, or with a different size or dtype"
            )


def _note_layers(communication: Communication, candidate: Trace) -> Iterator[str]:
    """Compare what the layers of one stack issue in the modules of the same place.

    The first and the last layer may differ for good reasons: the gradient of the model's input is not needed, and the
    loss may need a different layout. So only inner layers are compared.
    """
    stacks: dict[str, list[str]] = {}
    for name in communication.modules:
        if drop_layers(name) != name:
            stacks.setdefault(drop_layers(name), []).append(name)
    for stack in stacks.values():
        names = sorted(stack, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])
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


def note_attachment(reference: Trace, candidate: Trace) -> Iterator[str]:
    """Note what TTrace attached to, on each side where the script did not attach it."""
    sides = {"reference": reference.manifest.attachment, "candidate": candidate.manifest.attachment}
    found = {side: attachment for side, attachment in sides.items() if attachment is not None}
    for side, attachment in found.items():
        yield f"{side}: found {_describe_attachment(attachment)}"


def _describe_attachment(attachment: Attachment) -> str:
    number = attachment.num_microbatches
    microbatches = ", 1 microbatch a step on rank 0" if number == 1 else f", {number} microbatches a step on rank 0"
    return (
        f"model {attachment.model}, optimizer {', '.join(attachment.optimizers)}{microbatches if number else ''}; "
        f"data {'kept' if attachment.keeps_data else 'replaced'}: {attachment.data}"
    )


def note_environment(reference: Trace, candidate: Trace) -> Iterator[str]:
    """Note the versions, variables and flags of torch that differ between the two sides, and may explain a finding."""
    ours, theirs = reference.manifest, candidate.manifest
    both = ours.versions.keys() & theirs.versions.keys()
    versions = [_describe_difference(name, ours.versions, theirs.versions) for name in sorted(both)]
    variables = [
        _describe_difference(name, ours.environment, theirs.environment)
        for name in sorted(ours.environment | theirs.environment)
    ]
    flags = [
        _describe_difference(name, reference.flags, candidate.flags)
        for name in sorted(reference.flags | candidate.flags)
    ]
    for what, texts in (("versions", versions), ("variables", variables), ("settings of torch", flags)):
        different = [text for text in texts if text]
        if different:
            more = f", and {len(different) - _MOST_DIFFERENCES} more" if len(different) > _MOST_DIFFERENCES else ""
            yield f"the two sides ran with different {what}: {', '.join(different[:_MOST_DIFFERENCES])}{more}"


def _describe_difference(name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    a, b = ours.get(name, "unset"), theirs.get(name, "unset")
    return "" if a == b else f"{name} {a} in the reference, {b} in the candidate"


def note_dropout(reference: Trace, candidate: Trace) -> Iterator[str]:
    """Note in how many modules dropout was switched off."""
    for trace in (reference, candidate):
        if trace.dropout:
            yield f"dropout switched off in {len(trace.dropout)} modules, the first is {trace.dropout[0]}"


def note_log_probs(comparisons: Iterable[Comparison], reference: Trace, candidate: Trace) -> Iterator[str]:
    """Note how token probabilities differ between the sides, for instance a trainer and its rollout.

    The note has the mean ratio of the probabilities, and the token at which they differ most.
    """
    for comparison in comparisons:
        tensor_id = comparison.id
        if tensor_id.kind is not Kind.OUTPUT or tensor_id.name.rpartition(".")[2] != _LOG_PROBS:
            continue
        ours = LogicalTensor.of(reference, tensor_id)
        theirs = LogicalTensor.of(candidate, tensor_id, ours.shape if ours else None)
        if ours is None or theirs is None or ours.shape != theirs.shape or comparison.stats.count > _MOST_TOKENS:
            continue
        if ours.num_buckets or theirs.num_buckets or not comparison.stats.count:
            continue
        a, b = ours.tensor().double(), theirs.tensor().double()
        worst = (b - a).abs().argmax()
        index = list(map(int, torch.unravel_index(worst, ours.shape)))
        ratio = float((b - a).exp().mean())
        ours_there, theirs_there = float(a.flatten()[worst]), float(b.flatten()[worst])
        yield (
            f"{tensor_id.name}: the candidate's probability of a token is on average {ratio:.6g} x the reference's; "
            f"the worst token is {index}, with log-probability {theirs_there:.6g} instead of {ours_there:.6g}"
        )
