"""Logical tensors: the shards of one id as parts of one tensor, which are never merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ttrace.errors import LayoutError
from ttrace.layouts.ids import TensorId
from ttrace.layouts.infer import Splits, find_pending_axes, infer_layout
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import MICROBATCH_AXIS, Mesh
from ttrace.layouts.region import BoxPart, Region, Shape
from ttrace.layouts.source import INFERRED, LayoutSource, Provenance
from ttrace.tensors.coverage import Coverage, measure_coverage
from ttrace.trace.reader import Shard, Trace, UsedShard
from ttrace.values import compare
from ttrace.values.chunks import Bounds
from ttrace.values.compare import add_terms, compare_pair, compare_sums
from ttrace.values.kernels.pair import Term
from ttrace.values.stats import Stats, measure_difference

Sizes = Mapping[str, int]
FindLost = Callable[[Region], torch.Tensor]
"""Marks those elements of a region of the logical tensor that are left out of a comparison."""


@dataclass(frozen=True)
class Piece:
    """One distinct region: the summands of its pending sum, each with the replicas that hold it."""

    region: Region
    summands: tuple[tuple[Shard, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({shard.coord.rank for replicas in self.summands for shard in replicas}))

    def tensor(self) -> torch.Tensor:
        """This region's values: one shard, or the sum of the summands."""
        if len(self.summands) == 1:
            return self.summands[0][0].tensor()
        return add_terms([(1.0, replicas[0].tensor()) for replicas in self.summands], (...,))

    @property
    def has_values(self) -> bool:
        """Whether all its shards were recorded in full."""
        return all(shard.record.has_values for replicas in self.summands for shard in replicas)

    @property
    def stats(self) -> Stats | None:
        """What its run measured, in place of values; None if values must be added up first."""
        return self.summands[0][0].record.stats if len(self.summands) == 1 else None

    def terms(self) -> tuple[Term, ...]:
        """What must be added up to give this region's values."""
        if len(self.summands) == 1:  # as in most pieces
            return self.summands[0][0].terms()
        return tuple(term for replicas in self.summands for term in replicas[0].terms())

    def replica_pairs(self, mesh: Mesh, reduced: Collection[str] = ()) -> Iterator[tuple[Shard, Shard, bool]]:
        """Shards that must agree, and whether they lie along reduced axes alone.

        Each comes with the first that holds the same along those axes, or else with the first that holds the same.
        """
        for replicas in self.summands:
            if len(replicas) == 1:
                continue
            firsts: dict[tuple[int, ...], Shard] = {}
            for number, shard in enumerate(replicas):
                places = _find_places_beside(shard, mesh, reduced) if reduced else []
                same = next((firsts[place] for place in places if place in firsts), None)
                if same is not None and same.coord.rank != shard.coord.rank:
                    yield same, shard, True
                elif number > 0:
                    yield replicas[0], shard, False
                for place in places:
                    firsts.setdefault(place, shard)


@dataclass(frozen=True)
class LogicalTensor:
    """A logical tensor as one run holds it."""

    shape: Shape
    pieces: tuple[Piece, ...]
    pending: tuple[str, ...]
    layout: str
    by: Provenance | None

    @classmethod
    def of(cls, trace: Trace, tensor_id: TensorId, shape: Shape | None = None) -> LogicalTensor | None:
        """Collect the shards of an id; None if there are none, or no layout is stated and none can be inferred.

        A layout may be inferred from `shape`, which is the reference's.
        """
        shards = trace.shards.get(tensor_id)
        if not shards:
            return None
        if len(shards) == 1 and shards[0].record.region is not None:  # as most are: nothing needs to be placed
            return cls._of_placed(shards)
        # Without the virtual axis of microbatches: only a stated layout makes several of them one tensor.
        splits = {} if tensor_id.kind.is_of_param else trace.splits
        if shape is None and trace.manifest.role != "candidate" and not any(s.record.region for s in shards):
            # A reference with ranks of its own is compared with a candidate that has the same.
            placed = _place_by_rank(shards)
        else:
            placed = _place_shards(shards, shape, trace.mesh.sizes, splits, trace.batch_axes)
        return cls._of_placed(placed) if placed else None

    @classmethod
    def _of_placed(cls, placed: Sequence[Shard]) -> LogicalTensor:
        pieces, first = _make_pieces(placed), placed[0].record
        return cls(pieces[0].region.shape, pieces, first.pending, first.layout, first.by)

    def shapes(self) -> set[Shape]:
        """The logical shapes that the ranks state: one, if they agree."""
        return {piece.region.shape for piece in self.pieces}

    def coverage(self) -> Coverage:
        return measure_coverage(piece.region for piece in self.pieces)

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].summands[0][0].record.dtype

    @property
    def is_measured(self) -> bool:
        """Whether its run measured all of it instead of recording it."""
        return all(piece.stats is not None for piece in self.pieces)

    def find_used(self) -> LogicalTensor | None:
        """Find what is not zero where this tensor is not, as far as the run it was measured against does not tell.

        This is the tensor itself if it was recorded; None if no element tells more.
        """
        shards = [shard for piece in self.pieces for replicas in piece.summands for shard in replicas]
        if not any(shard.record.stats for shard in shards):
            return self
        if not any(shard.record.num_bytes for shard in shards):
            return None
        pieces = (
            replace(
                piece,
                summands=tuple(
                    tuple(UsedShard(shard.record, shard.coord, shard.rank) for shard in replicas)
                    for replicas in piece.summands
                ),
            )
            for piece in self.pieces
        )
        return replace(self, pieces=tuple(pieces))

    @property
    def num_buckets(self) -> int:
        """Of the sketch that any shard was recorded as; 0 if all were recorded in full."""
        most = 0
        for piece in self.pieces:
            for replicas in piece.summands:
                for shard in replicas:
                    if shard.record.sketch is not None:
                        most = max(most, shard.record.sketch.num_buckets)
        return most

    def sketched(self, num_buckets: int) -> torch.Tensor:
        """The sketch of the whole: those of all regions and summands add up to it."""
        shards = [replicas[0] for piece in self.pieces for replicas in piece.summands]
        total = shards[0].read_sketch(num_buckets)
        for shard in shards[1:]:
            total = total + shard.read_sketch(num_buckets)
        return total

    def tensor(self) -> torch.Tensor:
        """All pieces put together: for small tensors only."""
        parts = [(piece.region, piece.tensor()) for piece in self.pieces]
        full = torch.empty(self.shape, dtype=parts[0][1].dtype, device="cpu")
        for region, part in parts:
            region.put(part, full)
        return full


def _make_pieces(placed: Sequence[Shard]) -> tuple[Piece, ...]:
    """Group shards by their regions, and those of one region by the summand that they hold."""
    if len(placed) == 1 and (region := placed[0].record.region) is not None:  # most tensors of one rank
        return (Piece(region, ((placed[0],),)),)
    grouped: dict[Region, dict[tuple[int, ...], list[Shard]]] = {}
    for shard in placed:
        assert shard.record.region is not None
        summand = tuple(_index(shard, axis) for axis in shard.record.pending)
        grouped.setdefault(shard.record.region, {}).setdefault(summand, []).append(shard)
    return tuple(
        Piece(region, tuple(tuple(replicas) for _, replicas in sorted(summands.items())))
        for region, summands in grouped.items()
    )


def measure(
    a: LogicalTensor, b: LogicalTensor, *, factor: float = 1.0, lost: FindLost | None = None
) -> tuple[Stats, tuple[tuple[Piece, Stats], ...]]:
    """Compare b x factor with a, as a whole and for each of b's pieces; both may be sharded, each in its own way.

    `lost` marks the elements of a region that are left out. A sketch has no single elements and no pieces. What b's run
    measured against a's is taken as it is: it has left out such elements itself.
    """
    if lost is None and _are_whole(a, b):  # as most are: nothing needs to be cut
        [x], [y] = a.pieces, b.pieces
        found = compare_sums(x.terms(), [(factor * sign, term) for sign, term in y.terms()])
        return found, ((y, found),)
    num_buckets = max(a.num_buckets, b.num_buckets)
    if num_buckets and not b.is_measured:
        found = measure_difference(a.sketched(num_buckets), b.sketched(num_buckets), factor=factor)
        return replace(found, count=math.prod(a.shape), max_diff=0.0, max_at=None), ()
    parts = []
    total = Stats()
    loaded = [(piece.region, piece.terms()) for piece in a.pieces] if not b.is_measured else []
    for piece in b.pieces:
        part = piece.stats or _measure_piece(loaded, piece, factor, lost)
        parts.append((piece, part))
        total = total + part
    return total, tuple(parts)


def _are_whole(a: LogicalTensor, b: LogicalTensor) -> bool:
    """Whether both are of one piece each, which is all of one shape, and recorded in full."""
    if not len(a.pieces) == len(b.pieces) == 1:
        return False
    [x], [y] = a.pieces, b.pieces
    is_one = x.region.is_whole and (x.region is y.region or x.region == y.region)
    return is_one and x.has_values and y.has_values


def measure_shards(x: Shard, y: Shard) -> Stats:
    """Compare two shards of one region: their values, or their sketches."""
    if x.record.sketch is not None or y.record.sketch is not None:
        return compare_pair(x.read_stored(), y.read_stored())
    return compare_sums(x.terms(), y.terms())


def _measure_piece(
    reference: Sequence[tuple[Region, Sequence[Term]]], piece: Piece, factor: float, lost: FindLost | None
) -> Stats:
    total = Stats()
    terms = piece.terms()
    for region, theirs in reference:
        for part_a, part_b in region.overlaps(piece.region):
            xs = [(sign, part_a.of(term)) for sign, term in theirs]
            ys = [(factor * sign, part_b.of(term)) for sign, term in terms]
            find_lost = _find_lost_in(lost, part_a, region.shape) if lost is not None else None
            found = compare_sums(xs, ys, find_lost)
            if found.max_at is not None:
                found = replace(found, max_at=part_a.global_index(found.max_at))
            total = total + found
    return total


def _find_lost_in(lost: FindLost, part: BoxPart, shape: Shape) -> compare.FindLost:
    def find(bounds: Bounds) -> torch.Tensor:
        return lost(part.find_region(shape, bounds))

    return find


def _place_shards(
    shards: Sequence[Shard], shape: Shape | None, sizes: Sizes, splits: Splits, batch_axes: Sequence[str]
) -> list[Shard] | None:
    """The shards; one without a layout gets that of the other ranks, or else an inferred one."""
    stated = [shard for shard in shards if shard.record.region is not None]
    if len(stated) == len(shards):
        return stated
    if shape is None:
        shape = stated[0].record.region.shape if stated and stated[0].record.region is not None else None
    if shape is None:
        return None
    layouts = list(dict.fromkeys(shard.record.layout for shard in stated))
    rest = [shard for shard in shards if shard.record.region is None]
    followed = [_find_layout_like(layouts, shard, shape, sizes) for shard in rest]
    alone = [shard for shard, layout in zip(rest, followed, strict=True) if layout is None]
    if alone and any(shard.record.pending for shard in stated):
        return None  # a pending sum is never inferred, nor that there is none where others have one
    # An axis along which nobody else holds a part cannot be what cuts: ranks have microbatches or modules of their own.
    cutting = {axis: size for axis, size in sizes.items() if len({shard.coord[axis] for shard in shards}) > 1}
    own = (
        infer_layout(shape, [(shard.coord, shard.record.shape) for shard in alone], cutting, splits) if alone else None
    )
    if own is not None:
        own = replace(own, pending=find_pending_axes(shards[0].id.kind, own, batch_axes))
    for shard, layout in zip(rest, followed, strict=True):
        layout = layout or own
        if layout is None:
            by_rank = _place_by_rank(shards)
            return by_rank if by_rank and by_rank[0].record.region and by_rank[0].record.region.shape == shape else None
        stated.append(_with_layout(shard, layout, shape, sizes))
    return sorted(stated, key=lambda shard: shard.coord.rank)


def _place_by_rank(shards: Sequence[Shard]) -> list[Shard] | None:
    """The shards behind each other along their first dim, in the order of ranks; None if their shapes differ.

    It says nothing of what a tensor is a part of, and is the same for every run with these ranks. Numbers, which have
    no dim, are taken to be the same everywhere.
    """
    shapes = {shard.record.shape for shard in shards}
    if len(shards) < 2 or len(shapes) > 1:
        return None
    local = shards[0].record.shape
    regions = (_find_place(local, number, len(shards)) for number in range(len(shards)))
    ordered = sorted(shards, key=lambda shard: shard.coord.rank)
    by = Provenance(LayoutSource.RANKS)
    return [
        replace(shard, record=replace(shard.record, region=region, by=by))
        for shard, region in zip(ordered, regions, strict=True)
    ]


def _find_place(local: Shape, number: int, num_parts: int) -> Region:
    """The region of the part of this number, if parts of one shape lie behind each other."""
    if not local:
        return Region.whole(())
    size, *others = local
    runs = [((number * size, (number + 1) * size),), *(((0, length),) for length in others)]
    return Region((size * num_parts, *others), tuple(runs))


def _find_layout_like(layouts: Sequence[str], shard: Shard, shape: Shape, sizes: Sizes) -> Layout | None:
    """The first of these layouts that explains what a rank holds."""
    for text in layouts:
        try:
            layout = Layout.parse(text).of_rank(len(shape))
        except LayoutError:  # what was stated by other means than a layout
            continue
        if layout.region(shape, sizes, _locate(shard)).local_shape == shard.record.shape:
            return layout
    return None


def _with_layout(shard: Shard, layout: Layout, shape: Shape, sizes: Sizes) -> Shard:
    region = layout.region(shape, sizes, _locate(shard))
    record = replace(shard.record, region=region, pending=layout.pending, layout=str(layout), by=INFERRED)
    return replace(shard, record=record)


def _locate(shard: Shard) -> Mapping[str, int]:
    return {**shard.coord, MICROBATCH_AXIS: shard.record.microbatch}


def _find_places_beside(shard: Shard, mesh: Mesh, axes: Collection[str]) -> list[tuple[int, ...]]:
    """Where a shard lies on all other axes, by factorisation: ranks that share a place lie along the given axes."""
    return [
        (number, *(shard.coord[axis] for axis, _ in part if axis not in axes))
        for number, part in enumerate(mesh.factorisations)
    ]


def _index(shard: Shard, axis: str) -> int:
    return shard.record.microbatch if axis == MICROBATCH_AXIS else shard.coord[axis]
