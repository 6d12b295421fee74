"""Meshes of ranks: named axes with sizes, in one or more factorisations of the same ranks.

Axes are written slowest first, as in a row-major shape: `pp=2 dp=2 tp=4` puts neighbouring ranks on `tp`. A second
factorisation of the same ranks, which expert parallelism needs, follows after `|`: `pp=2 dp=2 tp=4 | pp=2 edp=1 ep=8`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ttrace.errors import LayoutError

_SIZE = re.compile("[0-9]{1,9}")
MICROBATCH_AXIS = "mb"
"""The virtual axis of microbatches, which a layout may name."""


@dataclass(frozen=True)
class Coord(Mapping[str, int]):
    """The position of one rank on every axis of every factorisation."""

    rank: int
    indices: tuple[tuple[str, int], ...]

    @cached_property
    def _index(self) -> dict[str, int]:
        return dict(self.indices)

    def __getitem__(self, axis: str) -> int:
        return self._index[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __str__(self) -> str:
        where = " ".join(f"{axis}{index}" for axis, index in self.indices)
        return f"rank {self.rank} ({where})" if where else f"rank {self.rank}"


@dataclass(frozen=True)
class Mesh:
    """Named axes with sizes; `factorisations` describe the same ranks, each slowest axis first."""

    factorisations: tuple[tuple[tuple[str, int], ...], ...] = ((),)

    def __post_init__(self) -> None:
        counts = {math.prod(size for _, size in axes) for axes in self.factorisations}
        if len(counts) != 1:
            raise LayoutError(
                f"mesh {self}: the factorisations have {sorted(counts)} ranks; they must have the same number."
            )
        strides: dict[str, tuple[int, int]] = {}
        for axes in self.factorisations:
            self._check_names(axes)
            for (axis, size), stride in zip(axes, _compute_strides(axes), strict=True):
                if strides.setdefault(axis, (size, stride)) != (size, stride):
                    raise LayoutError(
                        f"mesh {self}: axis {axis} has a different size or stride in two factorisations. "
                        "Rename it in one of them, or give it the same size and place in both."
                    )

    def _check_names(self, axes: tuple[tuple[str, int], ...]) -> None:
        names = [axis for axis, _ in axes]
        for axis, size in axes:
            if not axis.isidentifier() or axis == MICROBATCH_AXIS or names.count(axis) > 1 or size < 1:
                raise LayoutError(
                    f"mesh {self}: {axis}={size} is not a valid axis. An axis is an identifier used once, other than "
                    f"{MICROBATCH_AXIS!r}, with a size of at least 1."
                )

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """Make a mesh of one factorisation, slowest axis first: `Mesh.of(dp=2, tp=4)`."""
        return cls((tuple(sizes.items()),))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse a mesh, for example `pp=2 dp=2 tp=4 | pp=2 edp=1 ep=8`."""
        parts = []
        for part in text.split("|"):
            axes = []
            for word in part.split():
                axis, sign, size = word.partition("=")
                if not sign or not _SIZE.fullmatch(size):
                    raise LayoutError(f"mesh {text!r}: {word!r} is not axis=size, for instance tp=4.")
                axes.append((axis, int(size)))
            parts.append(tuple(axes))
        return cls(tuple(parts))

    def __str__(self) -> str:
        return " | ".join(" ".join(f"{axis}={size}" for axis, size in axes) for axes in self.factorisations)

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {axis: size for axes in self.factorisations for axis, size in axes}

    @property
    def num_ranks(self) -> int:
        return math.prod(size for _, size in self.factorisations[0])

    def coord(self, rank: int) -> Coord:
        if not 0 <= rank < self.num_ranks:
            raise LayoutError(f"mesh {self} has ranks 0 to {self.num_ranks - 1}, not {rank}.")
        index: dict[str, int] = {}
        for axes in self.factorisations:
            for (axis, size), stride in zip(axes, _compute_strides(axes), strict=True):
                index[axis] = rank // stride % size
        return Coord(rank, tuple(index.items()))

    def coords(self) -> Iterator[Coord]:
        return (self.coord(rank) for rank in range(self.num_ranks))

    def check_one_factorisation(self, axes: frozenset[str]) -> None:
        """Raise an error unless one factorisation has all of these axes."""
        if not any(axes <= {axis for axis, _ in part} for part in self.factorisations):
            unknown = sorted(axes - set(self.sizes))
            if unknown:
                raise LayoutError(
                    f"mesh {str(self)!r} has no axis {', '.join(unknown)}. Correct the name, or pass the job's axes to "
                    "attach(mesh=...)."
                )
            raise LayoutError(
                f"axes {', '.join(sorted(axes))} cannot be combined: mesh {str(self)!r} has them in different "
                "factorisations."
            )


def _compute_strides(axes: tuple[tuple[str, int], ...]) -> list[int]:
    return [math.prod(size for _, size in axes[i + 1 :]) for i in range(len(axes))]
