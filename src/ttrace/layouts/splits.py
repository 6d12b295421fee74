"""Splits: the ways in which one dim is cut along one axis.

A split is a pure function `(size, rank, world) -> ranges`, registered under the name that the layout notation uses.
Numbers in parentheses are passed as further arguments: `ffn/tp:fused(2)` calls `fused(size, rank, world, 2)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from ttrace.errors import LayoutError
from ttrace.layouts.ranges import Ranges, length, merge, select, whole

SplitFunction = Callable[..., Ranges]

_FUNCTIONS: dict[str, SplitFunction] = {}
_TEXT = re.compile(r"(?P<name>[a-z_]+)(?:\((?P<args>[0-9]{1,18}(?:,[0-9]{1,18})*)\))?")


def split(function: SplitFunction) -> SplitFunction:
    """Make a function `(size, rank, world, *numbers) -> ranges` usable in layouts under its own name."""
    name = function.__name__
    if not re.fullmatch(r"[a-z_]+", name) or name in _FUNCTIONS:
        raise LayoutError(f"a split cannot be named {name!r}: use lower-case letters, and a name that is not taken.")
    _FUNCTIONS[name] = function
    return function


@dataclass(frozen=True)
class Split:
    """A named split with its numbers."""

    name: str = "block"
    args: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Split:
        match = _TEXT.fullmatch(text)
        if match is None or match["name"] not in _FUNCTIONS:
            raise LayoutError(f"{text!r} is not a split. Known: {', '.join(sorted(_FUNCTIONS))}.")
        args = tuple(int(number) for number in match["args"].split(",")) if match["args"] else ()
        return cls(match["name"], args)

    def __str__(self) -> str:
        return f"{self.name}({','.join(map(str, self.args))})" if self.args else self.name

    def ranges(self, size: int, rank: int, world: int) -> Ranges:
        """Return the indices of a dim of this size that one rank holds, in its own order."""
        return _compute_ranges(self, size, rank, world)

    def local_size(self, size: int, rank: int, world: int) -> int:
        """Return the size of this dim in the local tensor, which includes padding."""
        if self.name == "padded":
            return _pad_size(size, world, *self.args) // world
        return length(self.ranges(size, rank, world))


BLOCK = Split()
"""The split of an axis if the layout names none."""
NO_SPLITS: Mapping[str, Split] = MappingProxyType({})
"""No splits by axis: nothing is stated."""


@cache
def _compute_ranges(how: Split, size: int, rank: int, world: int) -> Ranges:
    try:
        return merge(_FUNCTIONS[how.name](size, rank, world, *how.args))
    except TypeError as error:
        raise LayoutError(f"split {how}: the number of arguments in parentheses is wrong ({error}).") from None


@split
def block(size: int, rank: int, world: int) -> Ranges:
    """Cut into equal consecutive blocks; the last may be shorter or empty, as in `torch.chunk` and DTensor's Shard."""
    step = -(-size // world)
    return ((min(rank * step, size), min((rank + 1) * step, size)),)


@split
def balanced(size: int, rank: int, world: int) -> Ranges:
    """Cut into consecutive blocks whose sizes differ by at most one, longer ones first, as in `torch.tensor_split`."""
    base, extra = divmod(size, world)
    start = rank * base + min(rank, extra)
    return ((start, start + base + (rank < extra)),)


@split
def zigzag(size: int, rank: int, world: int) -> Ranges:
    """Take two of 2 x world blocks, one from each end, so that causal attention has the same cost on every rank."""
    return block(size, rank, 2 * world) + block(size, 2 * world - 1 - rank, 2 * world)


@split
def striped(size: int, rank: int, world: int, width: int = 1) -> Ranges:
    """Assign stripes of `width` indices to the ranks in turn."""
    if width < 1:
        raise LayoutError(f"striped({width}): a stripe has at least one index.")
    starts = range(rank * width, size, world * width)
    return tuple((start, min(start + width, size)) for start in starts)


@split
def fused(size: int, rank: int, world: int, *parts: int) -> Ranges:
    """Cut each of several matrices into blocks: `fused(2)` for gate and up, `fused(4,1,1)` for q, k and v."""
    num_parts = parts[0] if len(parts) == 1 else sum(parts)
    if 0 in parts or not parts or size % num_parts:
        raise LayoutError(
            f"fused({','.join(map(str, parts))}): {size} indices do not divide into these parts. "
            "Write fused(n) for n equal parts or fused(a,b,...) for their proportions, of a size they divide."
        )
    # A layout may state any number of parts, which must not fill the memory if the dim is empty.
    weights = () if size == 0 else (1,) * num_parts if len(parts) == 1 else parts
    unit, at, pieces = size // num_parts, 0, []
    for weight in weights:
        part = whole(weight * unit)
        pieces += [(at + a, at + b) for a, b in select(part, merge(block(weight * unit, rank, world)))]
        at += weight * unit
    return tuple(pieces)


@split
def padded(size: int, rank: int, world: int, multiple: int = 1) -> Ranges:
    """Cut a dim that is padded to a multiple of `multiple` x world, such as a vocabulary; no region has padding."""
    step = _pad_size(size, world, multiple) // world
    return ((min(rank * step, size), min((rank + 1) * step, size)),)


def _pad_size(size: int, world: int, multiple: int = 1) -> int:
    if multiple < 1:
        raise LayoutError(f"padded({multiple}): a dim is padded to a multiple of at least 1.")
    unit = multiple * world
    return -(-size // unit) * unit
