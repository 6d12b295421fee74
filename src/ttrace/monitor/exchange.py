"""Exchange between ranks: one small all-gather per check, and more only if it shows that something is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ttrace.layouts.mesh import Mesh


class AxisSummary(NamedTuple):
    """Fingerprints of everything on a rank that must be equal along one axis."""

    tensors: int = 0
    """All tensors, except the optimizer's state."""
    states: int = 0
    """The optimizer's state."""
    state_sites: int = 0
    """The names of that state. A sharded optimizer keeps different state on each rank, which is not compared."""


class RankReport(NamedTuple):
    """What a rank reports in a check, as numbers for one all-gather. Without arguments, it reports a failure."""

    axes: tuple[AxisSummary, ...]
    """One summary for each axis of the mesh, in the same order on all ranks."""
    data: int = 0
    """The fingerprint of the last step's data; 0 for none."""
    random_state: int = 0
    """The fingerprint of the random state; 0 if nothing was drawn since the last check."""
    num_steps: int = 0
    """How often the optimizer's step was called."""
    num_local: int = 0
    """How many problems the rank found on its own."""
    is_readable: int = 0
    """1 if the rank could read its model."""

    def pack(self) -> list[int]:
        return [*chain.from_iterable(self.axes), *self[1:]]

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> RankReport:
        num_own, size = len(cls._fields) - 1, len(AxisSummary._fields)
        summaries = numbers[:-num_own]
        axes = [AxisSummary(*summaries[i : i + size]) for i in range(0, len(summaries), size)]
        return cls(tuple(axes), *numbers[-num_own:])


@dataclass(frozen=True)
class Division:
    """How the ranks of a group divide into those that agree with the majority and those that do not."""

    wrong: tuple[int, ...]
    majority: tuple[int, ...]


def gather_reports(report: RankReport, device: torch.device) -> list[RankReport]:
    """Gather the reports of all ranks, in the order of the ranks."""
    if not dist.is_initialized():
        return [report]
    own = torch.tensor(report.pack(), dtype=torch.int64, device=device)
    everyones = own.new_empty(dist.get_world_size(), len(own))
    dist.all_gather(list(everyones.unbind()), own)
    return [RankReport.unpack(numbers) for numbers in everyones.tolist()]


def gather_objects(own: Any) -> list[Any]:
    """Gather an object from every rank."""
    if not dist.is_initialized():
        return [own]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return everyones


def choose_device(parameters: Iterable[torch.Tensor]) -> torch.device:
    """Choose the device of numbers that are exchanged: the host, if the process group supports it."""
    if not dist.is_initialized() or any(name in dist.get_backend() for name in ("gloo", "mpi")):
        return torch.device("cpu")
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def list_groups(mesh: Mesh, axes: Iterable[str]) -> list[tuple[int, ...]]:
    """List the groups of ranks whose coordinates differ along these axes only."""
    varying = set(axes)
    part = next((part for part in mesh.factorisations if varying <= {axis for axis, _ in part}), ())
    fixed = [axis for axis, _ in part if axis not in varying]
    groups: dict[tuple[int, ...], list[int]] = {}
    for coord in mesh.coords():
        groups.setdefault(tuple(coord[axis] for axis in fixed), []).append(coord.rank)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def split(values: Mapping[int, object]) -> Division | None:
    """Divide ranks by the values that they hold; None if all agree. Without a majority, all of them are wrong."""
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return None
    most, count = counts[0]
    if 2 * count <= len(values):
        return Division(tuple(values), ())
    return Division(
        tuple(rank for rank, value in values.items() if value != most),
        tuple(rank for rank, value in values.items() if value == most),
    )


def find_equal(values: Mapping[int, object]) -> Iterator[tuple[int, ...]]:
    """Yield each group of ranks that hold the same value."""
    ranks: dict[object, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return (tuple(group) for group in ranks.values() if len(group) > 1)
