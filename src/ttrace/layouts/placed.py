"""This module joins a layout with the tensor it speaks of: where the tensor lies, and who said so."""

from __future__ import annotations

from dataclasses import dataclass

from ttrace.tensors.region import Region

INFERRED = "inferred from shapes"
"""Who decided a layout that nobody stated."""
DISPATCHED = "the reference's routing"
"""Who decided where tokens lie that were dispatched to experts, whichever rank they came from."""


DTENSOR = "DTensor"
HOLDS = "ttrace.holds"
STATED = (DTENSOR, HOLDS, DISPATCHED)
"""How those begin who speak for a tensor before any rule does."""


@dataclass(frozen=True)
class Placed:
    """What a local tensor holds of its logical tensor, the axes it is still to be summed over, and who decided."""

    region: Region
    pending: tuple[str, ...] = ()
    layout: str = ""
    by: str = ""
    axes: frozenset[str] | None = None
    """The axes that whoever decided could speak of; None: all. A DTensor knows nothing beyond its own mesh."""
