"""Placement of a local tensor in its logical tensor, and the source of its layout.

Programs branch on the enum `LayoutSource`; `ttrace.report.facts` makes the sentences that users see."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ttrace.layouts.region import Region


class LayoutSource(Enum):
    """The source of a layout. Traces store the values."""

    DTENSOR = "dtensor"
    """The tensor's own placements."""
    DTENSOR_AND_SHAPES = "dtensor_and_shapes"
    """The tensor's own placements; axes outside its mesh were inferred from shapes."""
    SPMD_TYPES = "spmd_types"
    """The types that spmd_types keeps for the tensor, or for the tensor that it is the gradient of."""
    HOLDS = "holds"
    """`ttrace.holds`, called on the tensor itself."""
    HOLDS_OF_INPUT = "holds_of_input"
    """`ttrace.holds`, called on an input of the same module call. A rule that names the tensor takes precedence."""
    ROUTING = "routing"
    """The reference's routing, which determines the places of tokens that were dispatched to experts."""
    RULE = "rule"
    """A rule of the user. The detail is the rule."""
    ADAPTER = "adapter"
    """The framework's adapter. The detail is the adapter's rule."""
    DATA_PARALLEL = "data_parallel"
    """Data parallelism: a rank's loss is the part that belongs to its own rows."""
    CONTEXT_PARALLEL = "context_parallel"
    """Context parallelism: a rank's loss is the part that belongs to its own tokens."""
    SINGLE_RANK = "single_rank"
    """A single process holds every tensor whole."""
    UNCUT_MESH = "uncut_mesh"
    """No axis of the mesh cuts tensors, so every tensor is whole."""
    UNKNOWN_TO_REFERENCE = "unknown_to_reference"
    """The reference does not have this tensor, so it is assumed to be whole."""
    FIRST_FORWARD = "first_forward"
    """The first forward pass, with which a recomputation is compared."""
    RANKS = "ranks"
    """No layout was stated, but both sides have the same ranks: each rank is compared with its counterpart."""
    SHAPES = "shapes"
    """No layout was stated, but exactly one explains the shapes."""

    @property
    def is_inferred(self) -> bool:
        """Whether the layout was inferred from shapes, at least in part."""
        return self in (LayoutSource.SHAPES, LayoutSource.DTENSOR_AND_SHAPES)

    @property
    def precedes_rules(self) -> bool:
        """Whether the layout is stated by the tensor itself or its data, and therefore precedes rules."""
        return self in _PRECEDES_RULES


_PRECEDES_RULES = frozenset(
    {
        LayoutSource.DTENSOR,
        LayoutSource.DTENSOR_AND_SHAPES,
        LayoutSource.SPMD_TYPES,
        LayoutSource.HOLDS,
        LayoutSource.ROUTING,
    }
)


@dataclass(frozen=True, slots=True)
class Provenance:
    """The source of a layout, and the details that users see, such as the rule."""

    source: LayoutSource
    detail: str = ""


INFERRED = Provenance(LayoutSource.SHAPES)
"""The provenance of a layout that was inferred from shapes."""


@dataclass(frozen=True)
class Placement:
    """The region of a local tensor in its logical tensor, the axes with a pending sum, and the source."""

    region: Region
    pending: tuple[str, ...] = ()
    layout: str = ""
    by: Provenance | None = None
    axes: frozenset[str] | None = None
    """The axes that the source describes, or None for all. A DTensor describes only the axes of its own mesh."""

    @property
    def source(self) -> LayoutSource | None:
        """The source of the layout; None if it is unknown."""
        return self.by.source if self.by else None
