"""Resolver of layouts: which part of the reference's tensor a live tensor holds.

`LayoutResolver.resolve` asks these sources in this order, and the first that answers decides:

1. The tensor itself: the placements of a DTensor, or what else the adapter reads from it. If the reference's shape
   shows that further axes cut it, such as cp outside of a mesh of tp, they are added.
2. `ttrace.holds`, which the script called on this tensor.
3. A rule of the script or the command line for this site, and then a rule of the adapter for this site.
4. `ttrace.holds` of an input of the same module call, if this tensor has as many rows.
5. For the loss: each rank has a summand of its own, if axes are known to cut the batch or the sequence.
6. The mesh: on a single rank, or if no axis of the mesh cuts tensors, every tensor is whole.

If none of them answers, `resolve` returns None. Parameters and batches must be placed before training starts, so for
them the layout is inferred from the shapes (`infer`): the one that explains why this rank has this part of the
reference's shape. If there is none, or more than one, that is an error, which asks for a rule. Other layouts are left
to the judge, which knows the shapes of all ranks, unless a sketch or isolation needs them during the run.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ttrace.adapters.adapter import ANONYMOUS_AXIS, Adapter
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.errors import LayoutError
from ttrace.layouts.holds import HeldIndices, find_held
from ttrace.layouts.ids import Kind, Site, TensorId
from ttrace.layouts.infer import find_pending_axes, infer_layout
from ttrace.layouts.layout import Cut, Layout
from ttrace.layouts.mesh import MICROBATCH_AXIS
from ttrace.layouts.placement import INFERRED, LayoutSource, Placement, Provenance
from ttrace.layouts.region import Region, Shape
from ttrace.layouts.rules import Rule, Rules, apply_rule
from ttrace.layouts.splits import BLOCK, Split
from ttrace.ports.port import Port


class LayoutResolver:
    """Resolver of layouts to regions, for one rank."""

    def __init__(
        self,
        adapter: Adapter,
        rules: Rules,
        reference: ReferenceTrace,
        mb_axis_size: int,
        port: Port | None = None,
    ) -> None:
        rules.check(adapter.mesh)
        self._port = port
        self._adapter = adapter
        self._rules = rules
        self._reference = reference
        self._sizes = {**adapter.mesh.sizes, MICROBATCH_AXIS: mb_axis_size}
        self.splits: dict[str, Split] = {}
        """The axes that are known to cut activations, and how: the framework states it, or the batch shows it."""
        self.batch_axes: tuple[str, ...] = ()
        """The data axes along which each rank has some rows of the reference's batch; empty if each rank runs
        microbatches of its own."""
        self._whole: dict[Shape, Placement] = {}
        self._update_axes()

    def _update_axes(self) -> None:
        """Find what does not cut tensors, as far as the batch has shown: it is read for every tensor."""
        distributing, sizes = self._adapter.distributing_axes, self._adapter.mesh.sizes
        self._apart = frozenset(axis for axis in self._adapter.data_axes if not self.cuts(axis))
        """The axes along which each rank has microbatches of its own."""
        cutting = [axis for axis, size in sizes.items() if size > 1]
        self._why_whole: Provenance | None = None
        """Why a tensor is whole on this mesh if nothing states its layout; None if it may be cut."""
        if all(axis in distributing and axis not in self.batch_axes for axis in cutting):
            self._why_whole = Provenance(LayoutSource.UNCUT_MESH if cutting else LayoutSource.SINGLE_RANK)

    def set_split(self, cut: Cut) -> None:
        """Set how an axis cuts activations, as the framework states it."""
        if cut.axis not in self._adapter.mesh.sizes:
            raise LayoutError(
                f"context_parallel cuts along axis {cut.axis}, which mesh {str(self._adapter.mesh)!r} does not have. "
                "Give attach(mesh=...) the mesh of all ranks."
            )
        if self.splits.setdefault(cut.axis, cut.split) != cut.split:
            raise LayoutError(f"axis {cut.axis} cuts some sequences {self.splits[cut.axis]}, others {cut.split}.")

    def observe_batch(self, tensor_id: TensorId, local: Shape) -> None:
        """Learn from one tensor of a batch whether the data axes divide the rows of the reference's batch.

        The microbatch of `tensor_id` is numbered as this rank counts.
        """
        axes = tuple(axis for axis in self._data_axes if self._sizes[axis] > 1)
        if self.batch_axes or not axes:
            return
        rule = self._rules.decide(tensor_id.site)
        if rule is not None:
            cuts = [cut for dim in rule.layout.dims for cut in dim.cuts if cut.axis in axes]
        else:
            cuts = self._infer_batch_cuts(tensor_id, local, axes)
        self.batch_axes = tuple(cut.axis for cut in cuts)
        self.splits.update({cut.axis: cut.split for cut in cuts})
        self._update_axes()

    def _infer_batch_cuts(self, tensor_id: TensorId, local: Shape, axes: tuple[str, ...]) -> list[Cut]:
        """Infer the cuts along the data axes that turn the reference's shape into this rank's; none if they agree."""
        shape = self._reference.shape(tensor_id)
        own = tensor_id._replace(microbatch=self.count_microbatch(tensor_id.microbatch or 0))
        if shape is None or shape == local or self._reference.shape(own) == local:
            return []
        held = [(self._adapter.coord, local)]
        if self._has_own_microbatches(tensor_id, axes) and infer_layout(shape, held, self._cutting_sizes, self.splits):
            return []  # another axis explains the shape, and there is a microbatch for each of these ranks
        sizes = {**self._cutting_sizes, **{axis: self._sizes[axis] for axis in axes}}
        layout = infer_layout(shape, held, sizes, {**self.splits, **dict.fromkeys(axes, BLOCK)})
        return [Cut(axis, BLOCK) for axis in axes] if layout is not None and layout.axes >= set(axes) else []

    def _has_own_microbatches(self, tensor_id: TensorId, axes: tuple[str, ...]) -> bool:
        """Whether the reference ran as many microbatches as there are ranks along these axes."""
        num_ranks = math.prod(self._sizes[axis] for axis in axes)
        last = (tensor_id.microbatch or 0) * num_ranks + num_ranks - 1
        return self._reference.record(tensor_id._replace(microbatch=last)) is not None

    def is_like_reference(self, tensor_id: TensorId, tensor: torch.Tensor) -> bool:
        """Whether the reference has a tensor of this shape, or there is no reference yet."""
        shape = self._find_shape(tensor_id, tensor.ndim)
        return shape is None or shape == tuple(tensor.shape)

    def _find_shape(self, tensor_id: TensorId, num_dims: int) -> Shape | None:
        """Find the reference's shape; None if it has no such tensor, or has it in a shape of its own, as in a port."""
        if self._port is None:
            return self._reference.shape(tensor_id)
        ported = self._port.port(tensor_id.site, num_dims)
        if ported is None or not ported.is_like:
            return None
        return self._reference.shape(tensor_id._replace(site=ported.site))

    def count_microbatch(self, number: int) -> int:
        """Return the number of this rank's microbatch among those of all ranks.

        It is accumulation index x number of ranks with data of their own + position of this rank among them.
        """
        for axis in self._adapter.data_axes:
            if not self.cuts(axis):
                number = number * self._adapter.mesh.sizes[axis] + self._adapter.coord[axis]
        return number

    @property
    def _data_axes(self) -> tuple[str, ...]:
        """The axes that may divide a batch; if nothing is known of the ranks, the anonymous axis of all of them."""
        anonymous = tuple(axis for axis in (ANONYMOUS_AXIS,) if axis in self._adapter.mesh.sizes)
        return self._adapter.data_axes or anonymous

    def runs_together(self, site: Site) -> bool:
        """Whether this site's microbatches are parts of one tensor, rather than tensors of their own."""
        rule = self._rules.decide(site)
        return rule is not None and MICROBATCH_AXIS in rule.layout.axes

    def list_unused_rules(self) -> list[str]:
        return [f"{rule} matched nothing" for rule in self._rules.list_unused()]

    def cuts(self, axis: str) -> bool:
        """Whether the batch shows that this axis cuts tensors, or any rule names it."""
        return axis in self.batch_axes or any(axis in rule.layout.axes for rule in self._rules.rules)

    def resolve(
        self, tensor_id: TensorId, tensor: torch.Tensor, microbatch: int = 0, held: HeldIndices | None = None
    ) -> Placement | None:
        """Find where a tensor lies; None if nothing states it (the order is that of the module's docstring).

        `held` is what an input of its call states.
        """
        is_of_param = tensor_id.kind.is_of_param
        stated = self._adapter.read_placement(tensor, () if is_of_param else self._apart, self.splits)
        if stated is not None:
            return self._extend(tensor_id, stated)
        local = tuple(tensor.shape)
        own = find_held(tensor)
        if own is not None:
            return Placement(own.region(local), by=Provenance(LayoutSource.HOLDS))
        rule = self._rules.decide(tensor_id.site) or self._adapter.find_rule(tensor_id.site, tensor.ndim)
        if rule is not None:
            return self._apply_rule(tensor_id, rule, local, self._find_shape(tensor_id, tensor.ndim), microbatch)
        if held is not None and held.fits(local):
            return Placement(held.region(local), by=Provenance(LayoutSource.HOLDS_OF_INPUT))
        if tensor_id.kind is Kind.LOSS and self.splits:
            is_of_rows = set(self.splits) <= set(self.batch_axes)
            source = LayoutSource.DATA_PARALLEL if is_of_rows else LayoutSource.CONTEXT_PARALLEL
            return Placement(Region.whole(local), tuple(self.splits), by=Provenance(source))
        return self._place_whole(local) if self._why_whole else None

    def resolve_or_infer(self, tensor_id: TensorId, tensor: torch.Tensor, microbatch: int = 0) -> Placement:
        """Find the placement of a tensor that must be generated here: it may be inferred, but must not be missing."""
        placement = self.resolve(tensor_id, tensor, microbatch) or self.infer(tensor_id, tensor)
        if placement is None:
            local, shape = tuple(tensor.shape), self._find_shape(tensor_id, tensor.ndim)
            assert shape is not None, "what the reference does not know is whole"
            if tensor_id.kind is Kind.BATCH and self._data_axes:
                raise LayoutError(self._explain_batch(tensor_id, local, shape))
            raise LayoutError(
                f"{tensor_id.site}: this rank holds shape {local} of the reference's {shape}, and no single axis of "
                f"mesh {str(self._adapter.mesh)!r} explains that. Add a rule, for instance "
                f'{{"{tensor_id.name}": "{_suggest_layout(local, shape)}"}}.'
            )
        return placement

    def infer(self, tensor_id: TensorId, tensor: torch.Tensor) -> Placement | None:
        """Infer the layout that explains what this rank holds; None if there is none, or more than one."""
        local, shape = tuple(tensor.shape), self._find_shape(tensor_id, tensor.ndim)
        if shape is None:
            return Placement(Region.whole(local), by=Provenance(LayoutSource.UNKNOWN_TO_REFERENCE))
        splits = {} if tensor_id.kind.is_of_param else self.splits
        sizes = self._sizes if tensor_id.kind.is_of_param else self._cutting_sizes
        layout = infer_layout(shape, [(self._adapter.coord, local)], sizes, splits)
        if layout is None:
            return None
        region = layout.region(shape, sizes, self._adapter.coord)
        return Placement(region, find_pending_axes(tensor_id.kind, layout, self.batch_axes), str(layout), INFERRED)

    def _explain_batch(self, tensor_id: TensorId, local: Shape, shape: Shape) -> str:
        axes = " x ".join(f"{axis}={self._sizes[axis]}" for axis in self._data_axes)
        return (
            f"{tensor_id.site}: this rank has shape {local}, the reference has {shape}, and {axes} ranks do not divide "
            "the one into the other, so the two sides train on different data. Give each rank an equal part of the "
            "reference's batch, or let the reference run the batches of all ranks one after the other as microbatches. "
            f'Where a rank holds a different part, state it with a rule, for instance {{"{tensor_id.site}": "b/'
            f'{self._data_axes[0]} ..."}}.'
        )

    @property
    def _cutting_sizes(self) -> dict[str, int]:
        """The sizes of the axes that may cut a tensor.

        An axis along which ranks have microbatches or modules of their own is among them only if a rule names it.
        """
        own = {axis for axis in self._adapter.distributing_axes if not self.cuts(axis)}
        return {axis: size for axis, size in self._sizes.items() if axis not in own}

    def _extend(self, tensor_id: TensorId, stated: Placement) -> Placement:
        """Extend what a tensor states by axes that its own mesh does not have and that cut it too, as cp outside tp."""
        mesh, shape = self._adapter.mesh, self._find_shape(tensor_id, len(stated.region.shape))
        if stated.axes is None or stated.axes >= mesh.sizes.keys() or shape is None:
            return stated
        others = {axis: size for axis, size in self._cutting_sizes.items() if axis not in stated.axes}
        if tensor_id.kind is Kind.LOSS:
            summed = tuple(axis for axis in self.splits if axis in others)
            return replace(stated, pending=(*stated.pending, *summed))
        inner = stated.region
        if shape == inner.shape or tensor_id.kind.is_of_param:
            return stated
        layout = infer_layout(shape, [(self._adapter.coord, inner.shape)], others, self.splits)
        if layout is None:
            return stated
        text = _join_layouts(layout, stated.layout)
        region = inner.within(layout.region(shape, others, self._adapter.coord))
        return Placement(region, stated.pending, text, Provenance(LayoutSource.DTENSOR_AND_SHAPES))

    def resolve_gradient(self, tensor: torch.Tensor) -> Placement | None:
        """Find the placement that the gradient of a tensor will have, if the tensor itself states it."""
        return self._adapter.read_placement(tensor, self._apart, self.splits, of_gradient=True)

    def _place_whole(self, shape: Shape) -> Placement:
        if shape not in self._whole:  # a step has many tensors of a few shapes
            self._whole[shape] = Placement(Region.whole(shape), by=self._why_whole)
        return self._whole[shape]

    def _apply_rule(
        self, tensor_id: TensorId, rule: Rule, local: Shape, shape: Shape | None, microbatch: int
    ) -> Placement:
        where = {**self._adapter.coord, MICROBATCH_AXIS: microbatch}
        return apply_rule(rule, tensor_id.site, local, shape, sizes=self._sizes, where=where)


def _join_layouts(outer: Layout, inner: str) -> str:
    """Join two layouts in words: each dim of the outer one is cut further as the inner one states."""
    words = inner.split()
    dims = [f"{dim}{word.removeprefix(dim.name)}" for dim, word in zip(outer.dims, words, strict=False)]
    return " ".join([*dims, *words[len(dims) :]])


def _suggest_layout(local: Shape, shape: Shape) -> str:
    if len(local) != len(shape):
        return "..."
    return " ".join(f"d{i}/AXIS" if a != b else f"d{i}" for i, (a, b) in enumerate(zip(local, shape, strict=True)))
