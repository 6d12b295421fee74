"""Exchange between ranks: one small all-gather, and more only if it shows that something is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ttrace.layouts.mesh import Mesh


@dataclass(frozen=True)
class Division:
    """How the ranks of a group divide into those that agree with the majority and those that do not."""

    wrong: tuple[int, ...]
    majority: tuple[int, ...]


def gather(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Gather 64-bit numbers from all ranks: a list for each rank."""
    if not dist.is_initialized():
        return [list(numbers)]
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyones = own.new_empty(dist.get_world_size(), len(own))
    dist.all_gather(list(everyones.unbind()), own)
    found: list[list[int]] = everyones.tolist()
    return found


def gather_objects(own: Any) -> list[Any]:
    """Gather an object of every rank."""
    if not dist.is_initialized():
        return [own]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return everyones


def choose_device(parameters: Iterable[torch.Tensor]) -> torch.device:
    """Choose where numbers that are exchanged lie: on the host, if the process group takes it."""
    if not dist.is_initialized() or any(name in dist.get_backend() for name in ("gloo", "mpi")):
        return torch.device("cpu")
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def list_groups(mesh: Mesh, axes: Iterable[str]) -> list[tuple[int, ...]]:
    """List the groups of ranks that differ along these axes only."""
    moving = set(axes)
    part = next((part for part in mesh.factorisations if moving <= {axis for axis, _ in part}), ())
    fixed = [axis for axis, _ in part if axis not in moving]
    groups: dict[tuple[int, ...], list[int]] = {}
    for coord in mesh.coords():
        groups.setdefault(tuple(coord[axis] for axis in fixed), []).append(coord.rank)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def split(values: Mapping[int, object]) -> Division | None:
    """Split ranks by what they hold; None if they agree. Without a majority all of them are wrong."""
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
    """Find the ranks that hold the same as others."""
    ranks: dict[object, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return (tuple(found) for found in ranks.values() if len(found) > 1)
