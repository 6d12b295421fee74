"""Reader of traces: all complete records, and a sentence for everything that is not complete."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from ttrace.errors import NoTraceError, SketchError, TraceError
from ttrace.layouts.ids import Kind, TensorId, is_inside
from ttrace.layouts.mesh import MICROBATCH_AXIS, Coord, Mesh
from ttrace.layouts.splits import Split
from ttrace.trace.agreement import check_ranks, list_missing
from ttrace.trace.format import INITIAL_RATE, MANIFEST, Manifest, Operation, Record, is_update_known, rank_folder
from ttrace.trace.rank import RankTrace
from ttrace.trace.store import Place
from ttrace.untrusted import Limits, check_memory, refuse_more
from ttrace.values.kernels.pair import Term
from ttrace.values.sketch import compute_sketch

Settings = Mapping[str, str]
"""The optimizer's settings that affect its updates, by name."""
_NUM_OPENED = 32
"""How many ranks in a store are opened at the same time."""


@dataclass(frozen=True)
class Shard:
    """One record, with the rank that wrote it and access to its data."""

    record: Record
    coord: Coord
    rank: RankTrace

    @property
    def id(self) -> TensorId:
        return self.record.id

    def tensor(self) -> torch.Tensor:
        """Return the data, mapped from the file: only accessed pages are read, and writes do not change the file."""
        if self.record.stats is not None:
            raise SketchError(
                f"{self.id} was measured against another run instead of recorded, so its values are not known. Record "
                f"it in full: with --full '{self.id.site}'."
            )
        if self.record.sketch is not None:
            raise SketchError(
                f"{self.id} was recorded as a sketch, so its values are not known. Record it in full: with --full "
                f"'{self.id.site}', or everything without --record sketch."
            )
        return self.read_stored()

    def read_stored(self) -> torch.Tensor:
        """Read what the trace stores: the data, their sketch, or the indices that belong to their stats."""
        return self.rank.read_stored(self.record)

    def terms(self) -> tuple[Term, ...]:
        """Return the terms whose sum is the data."""
        return ((1.0, self.tensor()),)

    def release(self) -> None:
        """Release the memory of the mapped file until it is accessed again."""
        self.rank.release(self.record)

    def read_sketch(self, num_buckets: int) -> torch.Tensor:
        """Read the sketch, or compute it from the data. Sketches of tensors of one shape can be added."""
        if self.record.sketch is not None:
            return self.read_stored()
        assert self.record.region is not None
        return compute_sketch(self.tensor(), self.record.region, num_buckets)


@dataclass(frozen=True)
class UsedShard(Shard):
    """A measured shard as a mask of the elements that are zero only in the other run; a recorded one as its values."""

    def tensor(self) -> torch.Tensor:
        if self.record.stats is None:
            return super().tensor()
        check_memory(self.id, self.record.stats.count)
        used, indices = torch.zeros(self.record.stats.count, dtype=torch.bool, device="cpu"), self.read_stored()
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < used.numel():
            raise TraceError(f"{self.id}: it has indices outside of the tensor. Trace again.")
        used[indices] = True
        return used.view(self.record.shape)


@dataclass(frozen=True)
class UpdateShard(Shard):
    """The update of a parameter, after minus before, in float64. It is derived, not recorded."""

    before: Record

    def read_stored(self) -> torch.Tensor:
        after, sketch = super().read_stored(), self.record.sketch
        if sketch is None:
            return after.to(torch.float64) - self._before().to(torch.float64)
        if self.before.sketch is not None and self.record.shape == self.before.shape:
            return after - self.rank.read_stored(self.before)
        assert self.record.region is not None
        return after - compute_sketch(self._before(), self.record.region, sketch.num_buckets)

    def terms(self) -> tuple[Term, ...]:
        if self.record.sketch is not None:
            return super().terms()
        return ((1.0, super().read_stored()), (-1.0, self._before()))

    def release(self) -> None:
        super().release()
        self.rank.release(self.before)

    def _before(self) -> torch.Tensor:
        """Read the old values of the part that this rank updates: all of its part of the parameter, or a run of it."""
        region = self.record.region
        if self.before.sketch is None:
            before = self.rank.read_stored(self.before)
            if self.record.shape == self.before.shape:
                return before
            assert region is not None
            assert region.flat is not None, "only a run of a parameter differs in shape from it"
            return torch.cat([before.reshape(-1)[start:stop] for start, stop in region.flat])
        return self.rank.generate(replace(self.before, region=region))


class Trace:
    """All records of a run, by id."""

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self.ranks: tuple[RankTrace, ...] = tuple(_open_ranks(folder))
        if not self.ranks:
            raise NoTraceError(f"{folder} holds no trace. `ttrace trace --out {folder} -- COMMAND` makes one.")
        check_ranks(str(folder), [(rank.manifest, rank.end) for rank in self.ranks])
        self._shards: dict[TensorId, list[Shard]] | None = None

    @property
    def launch(self) -> str:
        """The launch that wrote this trace."""
        return self.manifest.launch

    def only(self, names: AbstractSet[str]) -> Trace:
        """Return this trace with the tensors of these modules and parameters only, which are fast to read."""
        part = copy(self)
        part.ranks, part._shards = tuple(rank.only(names) for rank in self.ranks), None
        return part

    def with_shards(self, shards: dict[TensorId, list[Shard]]) -> Trace:
        """Return this trace with other shards. Later changes of the dict are seen."""
        altered = copy(self)
        altered._shards = shards
        return altered

    def num_bytes(self, tensor_id: TensorId) -> int:
        """Return the total size of all shards of an id."""
        return sum(shard.record.num_bytes for shard in self.shards.get(tensor_id, ()))

    def release(self, tensor_id: TensorId) -> None:
        """Release the memory that was used to read an id."""
        for shard in self.shards.get(tensor_id, ()):
            shard.release()

    @property
    def has_sketches(self) -> bool:
        """Whether some tensors are recorded as sketches."""
        return self.count_sketches()[0] > 0

    def count_sketches(self) -> tuple[int, int]:
        """Return the number of tensors that are recorded as sketches, and of all recorded tensors."""
        is_sketch = {record.id: record.sketch is not None for rank in self.ranks for record in rank.records}
        return sum(is_sketch.values()), len(is_sketch)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the first rank. Role, mesh and seed are the same on every rank."""
        return self.ranks[0].manifest

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh.parse(self.manifest.mesh)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of all axes, including the virtual axis of microbatches."""
        return {**self.mesh.sizes, MICROBATCH_AXIS: self.manifest.num_microbatches}

    @property
    def shards(self) -> dict[TensorId, list[Shard]]:
        """Every shard of every logical tensor, in the order in which the first rank that has the tensor recorded it."""
        if self._shards is None:
            self._shards = self._collect_shards()
        return self._shards

    def _collect_shards(self) -> dict[TensorId, list[Shard]]:
        result: dict[TensorId, list[Shard]] = {}
        for rank in self.ranks:
            coord = self.mesh.coord(rank.manifest.rank)
            for record in rank.records:
                result.setdefault(record.id, []).append(Shard(record, coord, rank))
            for update in _derive_updates(rank, coord):
                result.setdefault(update.id, []).append(update)
        return result

    @cached_property
    def aliases(self) -> dict[str, str]:
        return {alias: name for rank in self.ranks for alias, name in rank.manifest.aliases.items()}

    @cached_property
    def operations(self) -> dict[str, tuple[Operation, ...]]:
        """For each module, the operations that its own code called, on the first rank that has it."""
        by_module: dict[str, tuple[Operation, ...]] = {}
        for rank in self.ranks:
            for name, operations in (rank.end.operations if rank.end else {}).items():
                by_module.setdefault(name, operations)
        return by_module

    @property
    def grad_factor(self) -> float:
        """The factor that the run's reduction still applies to activation gradients; 1 for an incomplete trace."""
        end = self.ranks[0].end
        return end.grad_factor if end else 1.0

    def is_opaque(self, name: str) -> bool:
        """Whether this module is inside compiled code on some rank, so that nothing in it was recorded."""
        return any(name != module and is_inside(name, module) for module in self._opaque)

    @cached_property
    def _opaque(self) -> frozenset[str]:
        return frozenset(module for rank in self.ranks for module in rank.manifest.opaque)

    def is_passed(self, tensor_id: TensorId) -> bool:
        """Whether this tensor belongs to a block that was not run, or was passed to or from such a block."""
        passed = self.manifest.passed
        if not passed:
            return False
        parent, _, number = tensor_id.name.rpartition(".")
        step = {Kind.INPUT: -1, Kind.GRAD_OUTPUT: 1}.get(tensor_id.kind)
        if step is not None and number.isdecimal() and len(number) < 19 and f"{parent}.{int(number) + step}" in passed:
            return True
        return any(is_inside(tensor_id.name, block) for block in passed)

    @cached_property
    def divided(self) -> frozenset[str]:
        """The modules that are divided over pipeline stages."""
        return frozenset(name for rank in self.ranks for name in rank.manifest.divided)

    @cached_property
    def untraced(self) -> frozenset[Kind]:
        """The kinds that some rank could not record."""
        return frozenset(kind for rank in self.ranks for kind in rank.manifest.untraced)

    @cached_property
    def reduced(self) -> frozenset[str]:
        """The axes along which final gradients have the same bits, according to all ranks."""
        return frozenset(self.manifest.reduced).intersection(*(rank.manifest.reduced for rank in self.ranks))

    @cached_property
    def forward_buffers(self) -> frozenset[str]:
        """The buffers that forward passes change on some rank."""
        return frozenset(name for rank in self.ranks if rank.end for name in rank.end.forward_buffers)

    @cached_property
    def unloaded(self) -> frozenset[str]:
        """Parameters and buffers that a checkpoint did not change on some rank."""
        return frozenset(name for rank in self.ranks if rank.end for name in rank.end.unloaded)

    @property
    def random(self) -> tuple[str, ...]:
        """The innermost modules that drew random numbers on some rank."""
        return tuple(dict.fromkeys(name for rank in self.ranks if rank.end for name in rank.end.random))

    @property
    def dropout(self) -> tuple[str, ...]:
        """The modules whose dropout was switched off on some rank."""
        return tuple(dict.fromkeys(name for rank in self.ranks for name in rank.manifest.dropout))

    @cached_property
    def splits(self) -> dict[str, Split]:
        """How axes cut activations, as stated by the framework while it ran."""
        stated = {axis: text for rank in self.ranks if rank.end for axis, text in rank.end.splits.items()}
        return {axis: Split.parse(text) for axis, text in stated.items()}

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes along which each rank had some rows of the reference's batch."""
        return tuple(dict.fromkeys(axis for rank in self.ranks if rank.end for axis in rank.end.batch_axes))

    @cached_property
    def settings(self) -> dict[str, tuple[Settings, ...]]:
        """For each parameter, its distinct optimizer settings: only one if all ranks that update it agree."""
        found: dict[str, dict[frozenset[tuple[str, str]], Settings]] = {}
        # Thousands of ranks have few distinct tables.
        ends = {(str(rank.end.settings), *rank.end.settings_of.items()): rank.end for rank in self.ranks if rank.end}
        for end in ends.values():
            groups = [(frozenset(group.items()), group) for group in end.settings]
            for name, number in end.settings_of.items():
                found.setdefault(name, {}).setdefault(*groups[number])
        return {name: tuple(settings.values()) for name, settings in found.items()}

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule changes the learning rates on some rank."""
        groups = (group for rank in self.ranks if rank.end for group in rank.end.settings)
        return any(INITIAL_RATE in group for group in groups)  # a schedule keeps the first rate there

    @property
    def flags(self) -> dict[str, str]:
        """Settings of torch that affect the rounding of kernels, on the first rank; empty for older traces."""
        end = self.ranks[0].end
        return dict(end.flags) if end is not None else {}

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(note for rank in self.ranks for note in (*rank.manifest.notes, *_notes_at_end(rank)))
        )

    def owners(self, name: str) -> frozenset[int]:
        """Return the ranks that have this module or parameter."""
        owners = [ranks for own, ranks in self._censuses if name in own.modules or name in own.parameters]
        return owners[0] if len(owners) == 1 else frozenset().union(*owners)

    @cached_property
    def _censuses(self) -> list[tuple[Manifest, frozenset[int]]]:
        """The distinct sets of modules and parameters, with their ranks: thousands of ranks of one stage share one."""
        censuses: dict[tuple[int, int], tuple[Manifest, list[int]]] = {}
        for rank in self.ranks:
            own = rank.manifest
            censuses.setdefault((id(own.modules), id(own.parameters)), (own, []))[1].append(own.rank)
        return [(manifest, frozenset(ranks)) for manifest, ranks in censuses.values()]

    @cached_property
    def identity(self) -> str:
        """A digest of the whole trace: ends have checksums of the records, and records have those of their bytes."""
        return hashlib.sha256(" ".join(rank.seals for rank in self.ranks).encode()).hexdigest()

    def problems(self) -> Iterator[str]:
        """Yield a sentence for everything that is missing from a complete run."""
        yield from self.gaps()
        for rank in self.ranks:
            yield from rank.end.problems if rank.end else ()

    def gaps(self) -> Iterator[str]:
        """Yield a sentence for each rank that left no trace, or did not finish it."""
        yield from list_missing(str(self.folder), self.manifest.num_ranks, {rank.manifest.rank for rank in self.ranks})
        for rank in self.ranks:
            if rank.end is None:
                yield (
                    f"{rank.folder} is incomplete: {len(rank.records)} records, then the run ended without closing it"
                )


def _notes_at_end(rank: RankTrace) -> tuple[str, ...]:
    return rank.end.notes if rank.end else ()


def _derive_updates(rank: RankTrace, coord: Coord) -> Iterator[UpdateShard]:
    """Derive the updates from parameters before and after each step."""
    before: dict[TensorId, list[Record]] = {}
    for record in rank.records:
        if record.id.kind is Kind.PARAM:
            before.setdefault(record.id, []).append(record)
    for record in rank.records:
        if record.id.kind is not Kind.PARAM_AFTER:
            continue
        # A rank may hold several parts of a parameter, and update only a run of one of them.
        held = before.get(record.id.at(Kind.PARAM), ())
        old = next((part for part in reversed(held) if part.region == record.region), held[-1] if held else None)
        # A parameter that was measured has a record of its update.
        if old is not None and old.stats is record.stats is None and is_update_known(old, record):
            yield UpdateShard(replace(record, id=record.id.at(Kind.UPDATE)), coord, rank, old)


def _open_ranks(folder: Place) -> Iterable[RankTrace]:
    """Open all ranks. In a store, rank 0 states how many there are, because listings may omit new objects."""

    def open_rank(place: Place) -> RankTrace | None:
        return RankTrace(place) if (place / MANIFEST).exists() else None

    if isinstance(folder, Path):
        paths = sorted(folder.glob("rank-*")) if folder.is_dir() else []
        return [rank for rank in map(open_rank, paths) if rank is not None]
    first = open_rank(folder / rank_folder(0))
    if first is None:
        return []
    refuse_more(folder, "its number of ranks", first.manifest.num_ranks, Limits.get().num_ranks)
    others = [folder / rank_folder(number) for number in range(1, first.manifest.num_ranks)]
    with ThreadPoolExecutor(_NUM_OPENED) as pool:
        return [first, *(rank for rank in pool.map(open_rank, others) if rank is not None)]
