"""Placement of a local tensor in its logical tensor, and who decided it."""

from __future__ import annotations

from dataclasses import dataclass

from ttrace.layouts.source import LayoutSource, Provenance
from ttrace.tensors.region import Region


@dataclass(frozen=True)
class Placement:
    """What a local tensor holds of its logical tensor, the axes it is still to be summed over, and who decided."""

    region: Region
    pending: tuple[str, ...] = ()
    layout: str = ""
    by: Provenance | None = None
    axes: frozenset[str] | None = None
    """The axes that whoever decided could speak of; None: all. A DTensor knows nothing beyond its own mesh."""

    @property
    def source(self) -> LayoutSource | None:
        """Who decided; None if nobody is named."""
        return self.by.source if self.by else None
