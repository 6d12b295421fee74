"""Sources of layouts: what decided where a tensor lies.

Programs use the enum; `ttrace.report.layout_source` makes the sentence for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class LayoutSource(Enum):
    """The source of a layout. The values are the words that a trace stores."""

    DTENSOR = "dtensor"
    """The tensor's own placements."""
    DTENSOR_AND_SHAPES = "dtensor_and_shapes"
    """The tensor's own placements; axes outside its mesh were inferred from shapes."""
    SPMD_TYPES = "spmd_types"
    """The types that spmd_types keeps of the tensor, or of the one that it is the gradient of."""
    HOLDS = "holds"
    """`ttrace.holds`, called on the tensor itself."""
    HOLDS_OF_INPUT = "holds_of_input"
    """`ttrace.holds`, called on an input of the same module call. A rule that names the tensor takes precedence."""
    ROUTING = "routing"
    """The reference's routing, which decides where tokens lie that were dispatched to experts."""
    RULE = "rule"
    """A rule of the user. The detail is the rule."""
    ADAPTER = "adapter"
    """The framework's adapter. The detail is the adapter's rule."""
    DATA_PARALLEL = "data_parallel"
    """Data parallelism: a rank's loss is the part of its own rows."""
    CONTEXT_PARALLEL = "context_parallel"
    """Context parallelism: a rank's loss is the part of its own tokens."""
    SINGLE_RANK = "single_rank"
    """A single process holds every tensor whole."""
    UNCUT_MESH = "uncut_mesh"
    """No axis of the mesh cuts tensors, so every tensor is whole."""
    UNKNOWN_TO_REFERENCE = "unknown_to_reference"
    """The reference has no such tensor, so it is taken to be whole."""
    FIRST_FORWARD = "first_forward"
    """The first forward pass, with which a recomputation is compared."""
    RANKS = "ranks"
    """No layout was stated, but both sides have the same ranks: each is compared with its own."""
    SHAPES = "shapes"
    """No layout was stated; exactly one explains the shapes."""

    @property
    def is_inferred(self) -> bool:
        """Whether the layout was inferred from shapes, at least in part."""
        return self in (LayoutSource.SHAPES, LayoutSource.DTENSOR_AND_SHAPES)

    @property
    def precedes_rules(self) -> bool:
        """Whether the tensor itself, or its data, states the layout, so that rules are not used."""
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
    """The source of a layout, and the details for people, such as the rule."""

    source: LayoutSource
    detail: str = ""


INFERRED = Provenance(LayoutSource.SHAPES)
"""The provenance of a layout that was inferred from shapes."""
