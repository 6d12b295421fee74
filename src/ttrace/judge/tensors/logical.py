"""Logical tensors: the shards of one id as parts of one tensor, which are never merged in memory.

Most tensors are one shard of one region. Such tensors take shortcuts, because a check reads hundreds of thousands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ttrace.errors import LayoutError
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.infer import Splits, find_pending_axes, infer_layout
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import MICROBATCH_AXIS, Mesh
from ttrace.layouts.placement import INFERRED, LayoutSource, Provenance
from ttrace.layouts.region import BoxPart, Coverage, Region, Shape, measure_coverage
from ttrace.trace.reader import Shard, Trace, UsedShard
from ttrace.values.chunks import Bounds
from ttrace.values.kernels.pair import Term
from ttrace.values.stats import ChunkMask, Stats, add_terms, compare_pair, compare_sums, measure_difference

Sizes = Mapping[str, int]
RegionMask = Callable[[Region], torch.Tensor]
"""Marks the elements of a region of the logical tensor that a comparison leaves out."""


@dataclass(frozen=True)
class Piece:
    """One distinct region: the summands of its pending sum, each with all its replicas."""

    region: Region
    summands: tuple[tuple[Shard, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({shard.coord.rank for replicas in self.summands for shard in replicas}))

    def tensor(self) -> torch.Tensor:
        """Return this region's values: one shard, or the sum of the summands."""
        if len(self.summands) == 1:
            return self.summands[0][0].tensor()
        return add_terms([(1.0, replicas[0].tensor()) for replicas in self.summands], (...,))

    @property
    def has_values(self) -> bool:
        """Whether all its shards were recorded in full."""
        return all(shard.record.has_values for replicas in self.summands for shard in replicas)

    @property
    def stats(self) -> Stats | None:
        """The stats that its run measured in place of values; None if summands must be added up first."""
        return self.summands[0][0].record.stats if len(self.summands) == 1 else None

    def terms(self) -> tuple[Term, ...]:
        """Return the terms whose sum is this region's values."""
        if len(self.summands) == 1:
            return self.summands[0][0].terms()
        return tuple(term for replicas in self.summands for term in replicas[0].terms())

    def replica_pairs(self, mesh: Mesh, reduced: Collection[str] = ()) -> Iterator[tuple[Shard, Shard, bool]]:
        """Yield pairs of shards that must agree, and whether they differ along reduced axes only.

        Each shard is paired with the first replica along those axes, or else with the first replica.
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
    """A logical tensor of one run."""

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
        if len(shards) == 1 and shards[0].record.region is not None:
            return cls._of_placed(shards)
        # Without the virtual axis of microbatches: only a stated layout makes several of them one tensor.
        splits = {} if tensor_id.kind.is_of_param else trace.splits
        if shape is None and trace.manifest.role != "candidate" and not any(s.record.region for s in shards):
            # A reference with several ranks is compared with a candidate that has the same ranks.
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
        """Find elements that are not zero in this tensor, but may be zero in the run it was measured against.

        This is the tensor itself if it was recorded, and None if there are no such elements.
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
        """The largest number of buckets of a shard's sketch; 0 if all shards were recorded in full."""
        most = 0
        for piece in self.pieces:
            for replicas in piece.summands:
                for shard in replicas:
                    if shard.record.sketch is not None:
                        most = max(most, shard.record.sketch.num_buckets)
        return most

    def sketched(self, num_buckets: int) -> torch.Tensor:
        """Return the sketch of the whole, the sum of the sketches of all regions and summands."""
        shards = [replicas[0] for piece in self.pieces for replicas in piece.summands]
        total = shards[0].read_sketch(num_buckets)
        for shard in shards[1:]:
            total = total + shard.read_sketch(num_buckets)
        return total

    def tensor(self) -> torch.Tensor:
        """Put all pieces together; for small tensors only."""
        parts = [(piece.region, piece.tensor()) for piece in self.pieces]
        full = torch.empty(self.shape, dtype=parts[0][1].dtype, device="cpu")
        for region, part in parts:
            region.put(part, full)
        return full


def _make_pieces(placed: Sequence[Shard]) -> tuple[Piece, ...]:
    """Group shards by their regions, and the shards of one region by their summand."""
    if len(placed) == 1 and (region := placed[0].record.region) is not None:
        return (Piece(region, ((placed[0],),)),)
    grouped: dict[Region, dict[tuple[int, ...], list[Shard]]] = {}
    for shard in placed:
        assert shard.record.region is not None
        summand = tuple(_find_summand(shard, axis) for axis in shard.record.pending)
        grouped.setdefault(shard.record.region, {}).setdefault(summand, []).append(shard)
    return tuple(
        Piece(region, tuple(tuple(replicas) for _, replicas in sorted(summands.items())))
        for region, summands in grouped.items()
    )


def measure(
    a: LogicalTensor, b: LogicalTensor, *, factor: float = 1.0, left_out: RegionMask | None = None
) -> tuple[Stats, tuple[tuple[Piece, Stats], ...]]:
    """Compare b x factor with a, as a whole and for each of b's pieces; both may be sharded, each in its own way.

    `left_out` marks the elements of a region that are left out. A sketch has no single elements and no pieces. Stats
    that b's run measured against a's are taken as they are: it has left out such elements itself.
    """
    if left_out is None and _are_whole(a, b):
        [x], [y] = a.pieces, b.pieces
        stats = compare_sums(x.terms(), [(factor * sign, term) for sign, term in y.terms()])
        return stats, ((y, stats),)
    num_buckets = max(a.num_buckets, b.num_buckets)
    if num_buckets and not b.is_measured:
        stats = measure_difference(a.sketched(num_buckets), b.sketched(num_buckets), factor=factor)
        return replace(stats, count=math.prod(a.shape), max_diff=0.0, max_at=None), ()
    parts = []
    total = Stats()
    loaded = [(piece.region, piece.terms()) for piece in a.pieces] if not b.is_measured else []
    for piece in b.pieces:
        part = piece.stats or _measure_piece(loaded, piece, factor, left_out)
        parts.append((piece, part))
        total = total + part
    return total, tuple(parts)


def _are_whole(a: LogicalTensor, b: LogicalTensor) -> bool:
    """Whether both have one piece, which is the whole tensor and was recorded in full."""
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
    reference: Sequence[tuple[Region, Sequence[Term]]], piece: Piece, factor: float, left_out: RegionMask | None
) -> Stats:
    total = Stats()
    terms = piece.terms()
    for region, theirs in reference:
        for part_a, part_b in region.overlaps(piece.region):
            xs = [(sign, part_a.of(term)) for sign, term in theirs]
            ys = [(factor * sign, part_b.of(term)) for sign, term in terms]
            mask = _cut_mask(left_out, part_a, region.shape) if left_out is not None else None
            stats = compare_sums(xs, ys, mask)
            if stats.max_at is not None:
                stats = replace(stats, max_at=part_a.global_index(stats.max_at))
            total = total + stats
    return total


def _cut_mask(left_out: RegionMask, part: BoxPart, shape: Shape) -> ChunkMask:
    """Turn a mask of the logical tensor into one of a part of it."""

    def mark(bounds: Bounds) -> torch.Tensor:
        return left_out(part.find_region(shape, bounds))

    return mark


def _place_shards(
    shards: Sequence[Shard], shape: Shape | None, sizes: Sizes, splits: Splits, batch_axes: Sequence[str]
) -> list[Shard] | None:
    """Place all shards; a shard without a layout gets that of other ranks, or else an inferred one."""
    placed = [shard for shard in shards if shard.record.region is not None]
    rest = [shard for shard in shards if shard.record.region is None]
    if not rest:
        return placed
    if shape is None:
        shape = next((shard.record.region.shape for shard in placed if shard.record.region is not None), None)
    if shape is None:
        return None
    stated = list(dict.fromkeys(shard.record.layout for shard in placed))
    layouts = [_find_layout_like(stated, shard, shape, sizes) for shard in rest]
    unexplained = [shard for shard, layout in zip(rest, layouts, strict=True) if layout is None]
    inferred = None
    if unexplained:
        if any(shard.record.pending for shard in placed):
            return None  # a pending sum is never inferred, nor its absence if other ranks have one
        # An axis along which all shards have one place cannot cut: its ranks have their own microbatches or modules.
        cutting = {axis: size for axis, size in sizes.items() if len({shard.coord[axis] for shard in shards}) > 1}
        inferred = infer_layout(shape, [(s.coord, s.record.shape) for s in unexplained], cutting, splits)
        if inferred is None:
            return _place_by_rank(shards, shape)
        inferred = replace(inferred, pending=find_pending_axes(shards[0].id.kind, inferred, batch_axes))
    for shard, layout in zip(rest, layouts, strict=True):
        chosen = layout or inferred
        assert chosen is not None, "each shard has a layout, or one was inferred"
        placed.append(_with_layout(shard, chosen, shape, sizes))
    return sorted(placed, key=lambda shard: shard.coord.rank)


def _place_by_rank(shards: Sequence[Shard], shape: Shape | None = None) -> list[Shard] | None:
    """Place the shards one after the other along their first dim, in the order of ranks.

    None if their shapes differ, or if they do not make up `shape`. This does not show what a tensor is a part of, but
    it is the same for every run with these ranks. A scalar is assumed to be the same on all ranks.
    """
    shapes = {shard.record.shape for shard in shards}
    if len(shards) < 2 or len(shapes) > 1:
        return None
    local = shards[0].record.shape
    regions = [_find_place(local, number, len(shards)) for number in range(len(shards))]
    if shape is not None and regions[0].shape != shape:
        return None
    ordered = sorted(shards, key=lambda shard: shard.coord.rank)
    by = Provenance(LayoutSource.RANKS)
    return [
        replace(shard, record=replace(shard.record, region=region, by=by))
        for shard, region in zip(ordered, regions, strict=True)
    ]


def _find_place(local: Shape, number: int, num_parts: int) -> Region:
    """Return the region of a part by its number, if parts of one shape follow each other along the first dim."""
    if not local:
        return Region.whole(())
    size, *others = local
    runs = [((number * size, (number + 1) * size),), *(((0, length),) for length in others)]
    return Region((size * num_parts, *others), tuple(runs))


def _find_layout_like(layouts: Sequence[str], shard: Shard, shape: Shape, sizes: Sizes) -> Layout | None:
    """Find the first of these layouts that explains what a rank holds."""
    for text in layouts:
        try:
            layout = Layout.parse(text).of_rank(len(shape))
        except LayoutError:  # the region was stated without a layout
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
    """List the coordinates of a shard on all other axes, for each factorisation of the mesh.

    Shards that share coordinates differ along the given axes only.
    """
    return [
        (number, *(shard.coord[axis] for axis, _ in part if axis not in axes))
        for number, part in enumerate(mesh.factorisations)
    ]


def _find_summand(shard: Shard, axis: str) -> int:
    return shard.record.microbatch if axis == MICROBATCH_AXIS else shard.coord[axis]


def factor_to_come(tensor_id: TensorId, reference: Trace, candidate: Trace) -> float:
    """Return the factor that the candidate's reduction still applies, relative to the reference's.

    A correct data-parallel run of two ranks has activation gradients that are exactly twice those of a reference that
    accumulates, but equal final gradients: it divides by two last. Each side states its factor; it is never fitted.
    """
    return candidate.grad_factor / reference.grad_factor if is_before_reduction(tensor_id) else 1.0


def is_before_reduction(tensor_id: TensorId) -> bool:
    """Whether the reduction's factor is still to be applied; backward starts from the loss, so it has it as well."""
    of_microbatch = tensor_id.kind is Kind.PARAM_GRAD and tensor_id.microbatch is not None
    return tensor_id.kind.is_activation_grad or of_microbatch or tensor_id.kind in (Kind.LOSS, Kind.MAIN_GRAD)


def note_factor(reference: Trace, candidate: Trace) -> list[str]:
    """Note the stated factors if the two sides differ."""
    ours, theirs = reference.grad_factor, candidate.grad_factor
    if ours == theirs:
        return []
    return [
        f"the candidate's loss and activation gradients were multiplied by {theirs / ours:g} before comparing, because "
        "its reduction of gradients applies this factor later"
    ]
