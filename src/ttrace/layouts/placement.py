"""Placement of a local tensor in its logical tensor, and the source that decided it."""

from __future__ import annotations

from dataclasses import dataclass

from ttrace.layouts.region import Region
from ttrace.layouts.source import LayoutSource, Provenance


@dataclass(frozen=True)
class Placement:
    """The region of a local tensor in its logical tensor, the axes it is still to be summed over, and the source."""

    region: Region
    pending: tuple[str, ...] = ()
    layout: str = ""
    by: Provenance | None = None
    axes: frozenset[str] | None = None
    """The axes that the source knows of, or None for all: a DTensor knows only the axes of its own mesh."""

    @property
    def source(self) -> LayoutSource | None:
        """The source of the layout; None if it is unknown."""
        return self.by.source if self.by else None
