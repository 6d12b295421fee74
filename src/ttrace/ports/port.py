"""One side of a port: the name and the place of each of its tensors in the candidate's terms.

The parts of a whole are tensors of one side that are a single tensor on the other side, such as q, k and v.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ttrace.errors import CaptureError
from ttrace.layouts import ranges as rg
from ttrace.layouts.ids import Kind, Site
from ttrace.layouts.placement import Placement
from ttrace.layouts.ranges import Ranges
from ttrace.layouts.region import Region, Shape
from ttrace.ports.dim_order import DimOrder, Transposition
from ttrace.ports.port_map import NUMBER, Join, PortMap, match_name, matches_site, rename

Side = Literal["reference", "candidate"]


@dataclass(frozen=True)
class Part:
    """A tensor that is a part of a whole: the rows of the whole that it has."""

    whole: str
    """The name of the whole."""
    number: int
    size: int
    """The number of rows of the whole."""
    rows: Ranges
    count: int = 1
    """The number of parts of the whole."""
    is_stacked: bool = False
    """Whether the whole has an additional first dim, along which this part is one row."""

    def place(self, region: Region, dim: int) -> Region:
        """Translate a region of the part into a region of the whole, whose rows are along this dim."""
        shape, dims = list(region.shape), list(region.dims)
        if self.is_stacked:
            shape.insert(0, self.size)
            dims.insert(0, self.rows)
        else:
            shape[dim] = self.size
            dims[dim] = rg.select(self.rows, dims[dim])
        return Region(tuple(shape), tuple(dims), region.flat)


def place_rows(sizes: Sequence[int], number: int, *, groups: int = 1, head: int = 0) -> Ranges:
    """Return the rows that a part has in the whole.

    `sizes` are the numbers of rows of all parts. The whole consists of groups, each with an equal share of every part,
    in order. With `head`, the elements of the two halves of each head of this size, which rotary embeddings rotate into
    each other, become adjacent.
    """
    if groups < 1 or any(size % groups for size in sizes) or (head and (head % 2 or sizes[number] % head)):
        raise CaptureError(
            f"parts of {', '.join(map(str, sizes))} rows cannot be divided into {groups} groups with heads of {head}."
        )
    shares = [size // groups for size in sizes]
    begin, share, step = sum(shares[:number]), shares[number], sum(shares)
    rows = rg.merge((group * step + begin, group * step + begin + share) for group in range(groups))
    return rg.select(rows, _pair_halves(sizes[number], head)) if head else rows


def _pair_halves(size: int, head: int) -> Ranges:
    places = torch.arange(head, device="cpu").view(head // 2, 2).t().reshape(-1)
    starts = torch.arange(0, size, head, device="cpu")
    return rg.from_indices((starts[:, None] + places).reshape(-1))


@dataclass(frozen=True)
class Ported:
    """A site in the candidate's terms: its name, and the place of its tensors."""

    site: Site
    order: Transposition | None = None
    """The transposition of dims; None if their order is the same."""
    part: Part | None = None
    dim: int = 0
    """The dim of the part's rows, or of padding."""
    is_summand: bool = False
    """Whether the tensors of all parts add up to that of the whole: gradients of the input that they share."""
    limit: int | None = None
    """The size of the dim without padding."""

    @property
    def is_like(self) -> bool:
        """Whether a tensor has the same place on both sides."""
        return self.order is None and self.part is None and self.limit is None

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a tensor with the candidate's dims."""
        if self._is_stacked(tensor.ndim):
            return tensor.unsqueeze(0)
        return tensor if self.order is None else self.order.apply(tensor)

    def undo(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view with this side's dims."""
        if self._is_stacked(tensor.ndim - 1):
            return tensor.squeeze(0)
        return tensor if self.order is None else self.order.undo(tensor)

    def place(self, own: Placement) -> Placement:
        """Return the placement in the candidate's terms, given the placement in this side's terms."""
        region = own.region
        if self.order is not None:
            region = self.order.place(region)
        if self.part is not None and self._is_cut(region):
            region = self.part.place(region, self.dim % len(region.shape))
        if self.limit is not None and region.shape:
            region = _clip(region, self.dim % len(region.shape), self.limit)
        return replace(own, region=region, layout=own.layout if self.order is None else "")

    def _is_stacked(self, num_dims: int) -> bool:
        """Whether the whole has an additional dim; runs of flat optimizers always have one dim."""
        return self.part is not None and self.part.is_stacked and num_dims > 1

    def _is_cut(self, region: Region) -> bool:
        """Whether this is a part of the whole: inputs, step counts and similar are the same for all parts."""
        return bool(region.shape) and self.site.kind.primal is not Kind.INPUT


class Port:
    """The map of a port, applied to one side.

    `parameters` has the shapes of this side's parameters, by this side's names. `read_size` reads a number of the
    model's config. `find_shape` finds the shape of a parameter in the reference, by the candidate's name, if it is
    known.
    """

    def __init__(
        self,
        port_map: PortMap,
        side: Side,
        parameters: Mapping[str, Shape],
        read_size: Callable[[str], int],
        find_shape: Callable[[str], Shape | None],
    ) -> None:
        self._map = port_map
        self._side = side
        self._read_size = read_size
        self._find_shape = find_shape
        self._parts = dict(self._find_parts(parameters))
        self._known: dict[tuple[Site, int], Ported | None] = {}
        self.ignored: dict[str, None] = {}
        """The sites of this side that the map ignores."""
        self._sizes: dict[str, int] = {}
        """The sizes of named dims in the last tensor that has them."""

    def rename(self, name: str) -> str:
        """Return the candidate's name of a module or parameter, or of the whole if it is a part."""
        part = self._parts.get(name)
        if part is not None:
            return part.whole
        return name if self._side == "candidate" else rename(self._map.names, name) or name

    def port(self, site: Site, num_dims: int) -> Ported | None:
        """Return a site in the candidate's terms; None if it is ignored."""
        key = site, num_dims
        if key not in self._known:
            self._known[key] = self._port(site, num_dims)
            if self._known[key] is None:
                self.ignored[str(site)] = None
        return self._known[key]

    def _port(self, site: Site, num_dims: int) -> Ported | None:
        kind, part = site.kind, self._parts.get(site.name)
        named = Site(self.rename(site.name), kind, site.slot)
        if self._is_ignored(site) or self._is_ignored(named):
            return None
        order = None
        if self._side == "reference":
            named = Site(named.name, kind, self._find_slot(named))
            order = self._find_order(named, num_dims)
        is_summand = part is not None and kind is Kind.GRAD_INPUT
        dim = 0 if kind.is_of_param else -1
        return Ported(named, order, part, dim, is_summand, self._find_limit(named, num_dims))

    def _is_ignored(self, site: Site) -> bool:
        patterns = self._map.ignore.reference if self._side == "reference" else self._map.ignore.candidate
        return any(matches_site(pattern, site) for pattern in patterns)

    def _find_slot(self, site: Site) -> str:
        for pattern, slot in self._map.slots.items():
            name, _, kind = pattern.partition("/")
            match = match_name(name, site.name)
            if match is not None and not match.rest and kind == f"{site.kind.primal}.{site.slot}".rstrip("."):
                return slot
        return site.slot

    def _find_order(self, site: Site, num_dims: int) -> Transposition | None:
        for pattern, order in reversed(self._map.dims.items()):
            name, _, kind = pattern.partition("/")
            match = match_name(name, site.name)
            is_matching_kind = site.kind.primal in ((kind,) if kind else (Kind.INPUT, Kind.OUTPUT))
            if match is not None and is_matching_kind and not (kind and match.rest):
                return DimOrder.parse(order).find_transposition(num_dims, self._sizes)
        return None

    def _find_limit(self, site: Site, num_dims: int) -> int | None:
        """Find the size without padding: of a parameter's rows, or of a module's last dim."""
        if self._side == "reference" or not num_dims or site.kind.primal is Kind.INPUT:
            return None
        for pattern in self._map.padded:
            match = match_name(pattern, site.name)
            if match is not None and not (match.rest and not site.kind.is_of_param):
                name = site.name if site.kind.is_of_param else f"{site.name}.weight"
                shape = self._find_shape(name)
                return shape[0] if shape else None
        return None

    # Parts

    def _find_parts(self, parameters: Mapping[str, Shape]) -> Mapping[str, Part]:
        """Find the parts among this side's parameters, and the modules that they are weights of."""
        all_parts: dict[str, Part] = {}
        for join in self._map.join:
            if join.side != self._side:
                continue
            wholes: dict[str, dict[int, str]] = defaultdict(dict)
            for name in parameters:
                for number, pattern in enumerate(join.parts):
                    match = match_name(pattern, name)
                    if match is not None:
                        own = number if match.number is None else match.number
                        wholes[match.fill(join.whole)][own] = name
            for whole, members in wholes.items():
                all_parts |= self._make_parts(join, whole, members, parameters)
        return all_parts

    def _make_parts(
        self, join: Join, whole: str, members: Mapping[int, str], parameters: Mapping[str, Shape]
    ) -> dict[str, Part]:
        """Make the parts of a whole; `members` are the names of its parameters, by number."""
        if any(NUMBER in pattern.split(".") for pattern in join.parts):
            known = self._find_shape(whole)
            size = known[0] if known else max(members) + 1
            return {name: Part(whole, i, size, ((i, i + 1),), is_stacked=True) for i, name in members.items()}
        missing = set(range(len(join.parts))) - set(members)
        if missing:
            raise CaptureError(f"{whole} lacks its part {join.parts[min(missing)]}: the map does not fit this model.")
        sizes = [parameters[members[number]][0] for number in sorted(members)]
        groups, heads = self._read_number(join.groups), [self._read_number(each) for each in join.rotary]
        parts: dict[str, Part] = {}
        for number, name in members.items():
            rows = place_rows(sizes, number, groups=groups, head=heads[number] if heads else 0)
            parts[name] = Part(whole, number, sum(sizes), rows, len(sizes))
            pattern = join.parts[number]
            module, _, last = name.rpartition(".")
            if last == "weight" and match_name(pattern, module) is not None:
                parts[module] = Part(whole.rpartition(".")[0], number, sum(sizes), rows, len(sizes))
        return parts

    def _read_number(self, number: int | str) -> int:
        if isinstance(number, int):
            return number
        numerator, _, denominator = (word.strip() for word in number.partition("/"))
        return self._read_size(numerator) // (self._read_size(denominator) if denominator else 1)


def _clip(region: Region, dim: int, size: int) -> Region:
    """Remove indices beyond this size along a dim: they are padding, which is not part of a region."""
    shape, dims = list(region.shape), list(region.dims)
    if size >= shape[dim]:
        return region
    shape[dim] = size
    dims[dim] = rg.merge((start, min(stop, size)) for start, stop in dims[dim])
    clipped = Region(tuple(shape), tuple(dims))
    if region.flat is None:
        return clipped
    length = math.prod(clipped.box_shape)  # padding follows all other rows
    return replace(clipped, flat=rg.merge((start, min(stop, length)) for start, stop in region.flat))
