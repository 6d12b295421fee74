"""Comparison of two checkpoints, tensor by tensor: what differs, in which region, and why."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from ttrace.checkpoints.checkpoint import Checkpoint
from ttrace.judge.causes.search import find_cause
from ttrace.judge.compare import Comparer
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.verdict import Cause, CauseName
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.layouts.region import Region
from ttrace.trace.format import DTYPE_NAMES, End, Manifest, Record
from ttrace.trace.reader import Trace
from ttrace.trace.writer import Writer

MOST_EXPLAINED = 64
"""The number of differences whose cause is searched for; further ones are only listed."""
_EXACT = 1e-12
"""The margin of comparisons: nothing is rounded in a checkpoint."""
_ROUNDING = 4.0
"""An error of up to this many units of the dtype may come from a different order of summation."""
_STATED = Provenance(LayoutSource.RULE, "a checkpoint")
_MOST_BESIDE = 2**28
"""The most bytes of other tensors that are searched for the values of a tensor."""


class Sameness(StrEnum):
    """The relation of a tensor to the same tensor in the other checkpoint."""

    SAME = "same"
    ROUNDED = "rounded"
    """Stored in a different dtype, with the values rounded to it."""
    DIFFERENT = "different"
    OTHER_SHAPE = "other shape"
    ONLY_REFERENCE = "only in the reference"
    ONLY_CANDIDATE = "only in the candidate"


@dataclass(frozen=True)
class TensorDifference:
    """One tensor or value that differs."""

    name: str
    sameness: Sameness
    sentence: str
    cause: CauseName | None = None
    """The cause, as in findings of a run; None if causes do not apply."""
    region: tuple[tuple[int, int], ...] = ()
    """The smallest region with all elements that differ: begin and end along each dim."""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class CheckpointComparison:
    """The result of comparing two checkpoints."""

    counts: Mapping[Sameness, int]
    differences: tuple[TensorDifference, ...]
    notes: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        return not self.differences


def compare_checkpoints(reference: Checkpoint, candidate: Checkpoint) -> CheckpointComparison:
    """Compare every tensor and value of two checkpoints."""
    names, notes = match_names(reference, candidate)
    counts = dict.fromkeys(Sameness, 0)
    differences: list[TensorDifference] = []
    for ours, theirs in names:
        result = _compare_one(reference, candidate, ours, theirs, explains=len(differences) < MOST_EXPLAINED)
        if isinstance(result, TensorDifference):
            differences.append(result)
        counts[result.sameness if isinstance(result, TensorDifference) else result] += 1
    if counts[Sameness.ROUNDED]:
        notes.append(
            f"{counts[Sameness.ROUNDED]} tensors are stored in a different dtype, with the values rounded to it"
        )
    for name in sorted(reference.values.keys() & candidate.values.keys()):
        a, b = reference.values[name], candidate.values[name]
        if not _is_equal(a, b):
            differences.append(
                TensorDifference(
                    name, Sameness.DIFFERENT, f"{_shorten(a)} in the reference, {_shorten(b)} in the candidate"
                )
            )
    if alone := sorted(reference.values.keys() ^ candidate.values.keys()):
        notes.append(f"{len(alone)} values are only in one of them, such as {', '.join(alone[:3])}")
    return CheckpointComparison(counts, tuple(differences), tuple(notes))


def match_names(reference: Checkpoint, candidate: Checkpoint) -> tuple[list[tuple[str, str]], list[str]]:
    """Pair the names of both sides, one of which may have a prefix; a missing name is empty. Return notes as well."""
    prefix_ours, prefix_theirs = find_prefixes(list(reference.tensors), list(candidate.tensors))
    ours = {name.removeprefix(prefix_ours): name for name in reference.tensors if name.startswith(prefix_ours)}
    theirs = {name.removeprefix(prefix_theirs): name for name in candidate.tensors if name.startswith(prefix_theirs)}
    pairs = [(name, theirs.get(key, "")) for key, name in ours.items()]
    pairs += [("", name) for key, name in theirs.items() if key not in ours]
    pairs += [(name, "") for name in reference.tensors if not name.startswith(prefix_ours)]
    pairs += [("", name) for name in candidate.tensors if not name.startswith(prefix_theirs)]
    sides = (("reference", prefix_ours), ("candidate", prefix_theirs))
    return pairs, [f"names of the {side} were read without {prefix!r}" for side, prefix in sides if prefix]


def find_prefixes(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """Find the prefix of one side's names whose removal gives the most common names; empty if none is needed."""
    best, most = ("", ""), len(set(ours) & set(theirs))
    for names, others, is_ours in ((ours, theirs, True), (theirs, ours, False)):
        known = set(others)
        for prefix in dict.fromkeys(_list_prefixes(names)):
            num_common = sum(name.removeprefix(prefix) in known for name in names if name.startswith(prefix))
            if num_common > most:
                best, most = ((prefix, "") if is_ours else ("", prefix)), num_common
    return best


def _list_prefixes(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:end]) + "." for end in range(1, min(len(parts), 4)))


def _compare_one(
    reference: Checkpoint, candidate: Checkpoint, ours: str, theirs: str, *, explains: bool
) -> TensorDifference | Sameness:
    if not theirs:
        return TensorDifference(
            ours,
            Sameness.ONLY_REFERENCE,
            "the candidate does not have this tensor",
            shape=reference.tensors[ours].shape,
        )
    if not ours:
        return TensorDifference(
            theirs,
            Sameness.ONLY_CANDIDATE,
            "the reference does not have this tensor",
            shape=candidate.tensors[theirs].shape,
        )
    a, b = reference.read(ours), candidate.read(theirs)
    if a.shape != b.shape:
        return TensorDifference(ours, Sameness.OTHER_SHAPE, _explain_shape(a, b), shape=tuple(a.shape))
    if a.dtype != b.dtype and _is_rounded(a, b):
        return Sameness.ROUNDED
    differs = _find_different(a, b)
    if not differs.any():
        return Sameness.SAME if a.dtype == b.dtype else Sameness.ROUNDED
    region = _find_region(differs)
    cause = _explain(reference, ours, a, b, region) if explains else None
    sentence = cause.sentence if cause is not None else "the values differ"
    if any(size != end - begin for size, (begin, end) in zip(a.shape, region, strict=True)):
        part = ", ".join(f"{begin}:{end}" for begin, end in region)
        sentence = f"only [{part}] of {list(a.shape)} differs, and there {sentence}"
    return TensorDifference(ours, Sameness.DIFFERENT, sentence, cause.name if cause else None, region, tuple(a.shape))


def _explain(
    reference: Checkpoint, name: str, a: torch.Tensor, b: torch.Tensor, region: Sequence[tuple[int, int]]
) -> Cause:
    """Find the cause in the region that differs, as a check does for parameters of a run."""
    if torch.equal(a, b):
        return Cause(CauseName.UNEXPLAINED, "the values are equal, but not their bits: the signs of zeros differ")
    if any(each.dtype not in DTYPE_NAMES for each in (a, b)):
        return Cause(CauseName.UNEXPLAINED, f"the values differ; no causes are known for {a.dtype}")
    if a.is_floating_point() and (rounding := _measure_rounding(a, b)):
        return Cause(CauseName.UNEXPLAINED, rounding)
    with tempfile.TemporaryDirectory() as folder:
        part = tuple(slice(begin, end) for begin, end in region)
        beside = {other: tensor[part] for other, tensor in _list_alike(reference, name, a)}
        a, b = a[part], b[part]
        trusted = _write(Path(folder) / "reference", "reference", {name: a, **beside})
        twin = _write(Path(folder) / "twin", "twin", {name: a})
        other = _write(Path(folder) / "candidate", "candidate", {name: b})
        model = ToleranceModel.measure(trusted, [twin], _EXACT)
        comparison = Comparer(trusted, model, other).comparison(_name_tensor(name))
        return find_cause(comparison, trusted, other)


def _list_alike(reference: Checkpoint, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield other tensors of the same shape, one of which may have been stored instead of this one."""
    room = _MOST_BESIDE
    for other, info in reference.tensors.items():
        if other != name and info.shape == tuple(tensor.shape):
            room -= tensor.numel() * tensor.element_size()
            if room < 0:
                return
            yield other, reference.read(other)


def _write(folder: Path, role: str, tensors: Mapping[str, torch.Tensor]) -> Trace:
    owned = {_name_tensor(name).name: True for name in tensors}
    writer = Writer(folder, Manifest(role=role, rank=0, num_ranks=1, mesh="", seed=0, parameters=owned))
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        record = Record(_name_tensor(name), shape, tensor.dtype, Region.whole(shape), layout="...", by=_STATED)
        writer.write(record, tensor.contiguous())
    writer.close(End(num_steps=1))
    return Trace(folder)


def _name_tensor(name: str) -> TensorId:
    readable = "".join("." if char in "/@" or char.isspace() else char for char in name)
    return TensorId.of(0, None, readable, Kind.PARAM)


def _explain_shape(a: torch.Tensor, b: torch.Tensor) -> str:
    """Describe the relation of two tensors with different shapes."""
    words = f"{list(a.shape)} in the reference, {list(b.shape)} in the candidate"
    if a.dim() == b.dim() == 2 and a.shape == b.T.shape and torch.equal(a, b.T.to(a.dtype)):
        return f"{words}: transposed"
    if a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten().to(a.dtype)):
        return f"{words}: the same values in another shape"
    different = [dim for dim in range(min(a.dim(), b.dim())) if a.shape[dim] != b.shape[dim]]
    if a.dim() != b.dim() or len(different) != 1:
        return words
    (dim,) = different
    size = min(a.shape[dim], b.shape[dim])
    small, large, side = (a, b, "candidate") if a.shape[dim] == size else (b, a, "reference")
    rest = large.narrow(dim, size, large.shape[dim] - size)
    if torch.equal(small, large.narrow(dim, 0, size).to(small.dtype)):
        padding = "of zeros" if not rest.any() else "of other values"
        return f"{words}: the {side} has {rest.shape[dim]} more indices {padding} along dim {dim}, padding perhaps"
    for begin in range(size, large.shape[dim] - size + 1, size):
        if torch.equal(small, large.narrow(dim, begin, size).to(small.dtype)):
            end = begin + size
            return f"{words}: one has only {begin}:{end} of the other along dim {dim}, like one of several shards"
    return words


def _is_rounded(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the tensor of lower precision is the rounded other tensor."""
    if not (a.is_floating_point() and b.is_floating_point()):
        return False
    strong, weak = (a, b) if torch.finfo(a.dtype).eps < torch.finfo(b.dtype).eps else (b, a)
    return torch.equal(strong.to(weak.dtype).float(), weak.float())


def _measure_rounding(a: torch.Tensor, b: torch.Tensor) -> str:
    """Describe a difference that is within rounding; empty for a larger one."""
    size = float(a.double().norm())
    error = float((a.double() - b.double()).norm()) / size if size else 0.0
    unit = max(torch.finfo(t.dtype).eps for t in (a, b) if t.is_floating_point())
    return f"the values differ by rounding: the relative error is {error:.1g}" if 0 < error <= _ROUNDING * unit else ""


def _find_region(differs: torch.Tensor) -> tuple[tuple[int, int], ...]:
    bounds = []
    for dim in range(differs.dim()):
        others = [other for other in range(differs.dim()) if other != dim]
        indices = (differs.any(dim=others) if others else differs).nonzero().flatten()
        bounds.append((int(indices[0]), int(indices[-1]) + 1))
    return tuple(bounds)


def _find_different(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mark the elements that differ: in any bit, or by value if the dtypes differ."""
    if a.dtype != b.dtype:
        return a != b
    if not a.numel():
        return torch.zeros(a.shape, dtype=torch.bool, device="cpu")
    bits = (each.detach().contiguous().flatten().view(torch.uint8).view(each.numel(), -1) for each in (a, b))
    ours, theirs = bits
    return (ours != theirs).any(1).view(a.shape)


def _is_equal(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError, TypeError):
        return repr(a) == repr(b)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
