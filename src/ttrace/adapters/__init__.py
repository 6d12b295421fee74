"""Adapters: what must be known of each framework, such as its mesh, names, layouts, microbatches and state.

The author of an adapter imports everything from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttrace.adapters.adapter import Adapter, FrameworkEvents, OwnedSlice, Share
    from ttrace.adapters.native.adapter import Native
    from ttrace.layouts.ids import Kind, Site
    from ttrace.layouts.layout import Layout
    from ttrace.layouts.mesh import Mesh
    from ttrace.layouts.placement import LayoutSource, Placement
    from ttrace.layouts.rules import Rule
    from ttrace.patches import Patches, SharedPatches

# fmt: off
__all__ = [
    "Adapter", "FrameworkEvents", "Kind", "Layout", "LayoutSource", "Mesh", "Native", "OwnedSlice", "Patches",
    "Placement", "Rule", "Share", "SharedPatches", "Site",
]
# fmt: on
_MODULES = {
    "adapters.adapter": ("Adapter", "FrameworkEvents", "OwnedSlice", "Share"),
    "adapters.native.adapter": ("Native",),
    "layouts.ids": ("Kind", "Site"),
    "layouts.layout": ("Layout",),
    "layouts.mesh": ("Mesh",),
    "layouts.placement": ("LayoutSource", "Placement"),
    "layouts.rules": ("Rule",),
    "patches": ("Patches", "SharedPatches"),
}
"""The modules of the names, imported on first use: the modules below this package import it before them."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"ttrace.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
