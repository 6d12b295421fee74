"""Names of a model whose other side is another implementation of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from ttrace.capture.plan import Plan
from ttrace.capture.resolve.names import NamePath, Names
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.errors import CaptureError
from ttrace.layouts.ids import Kind, Site, TensorId
from ttrace.layouts.placement import Placement
from ttrace.layouts.region import Shape
from ttrace.ports.port import Port, Side

_Value = TypeVar("_Value")


def make_port(plan: Plan, chunks: Sequence[nn.Module], naming: NamePath, reference: ReferenceTrace) -> Port | None:
    """Make this side of the plan's port, if it has one."""
    if plan.port is None:
        return None

    def find_shape(name: str) -> Shape | None:
        return reference.shape(TensorId.of(0, None, name, Kind.PARAM))

    shapes = {name: tuple(parameter.shape) for name, parameter in Names(chunks, naming).parameters()[0].items()}
    side: Side = "candidate" if plan.role == "candidate" else "reference"
    return Port(plan.port, side, shapes, lambda name: _read_number(chunks, name), find_shape)


@dataclass(frozen=True)
class PortNames:
    """The names that a trace has for modules and parameters: their own or, in a port, the candidate's."""

    port: Port | None

    def rename(self, name: str) -> str:
        """Return the name of a module or parameter; that of the whole, if it is a part."""
        return name if self.port is None else self.port.rename(name)

    def rename_all(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self.rename, names)))

    def rename_keys(self, table: Mapping[str, _Value]) -> dict[str, _Value]:
        """Rename the keys of a table; parts have one entry."""
        return {self.rename(name): each for name, each in table.items()}

    def notes(self) -> list[str]:
        """Return a note about the sites that the map ignores, if there are any."""
        ignored = list(self.port.ignored) if self.port is not None else []
        return [f"the map ignores {len(ignored)} sites, the first is {ignored[0]}"] if ignored else []

    def find_padding(self, parameters: Mapping[str, Placement]) -> dict[str, int]:
        """Find how many rows each parameter has only as padding, given the placements in its own terms."""
        if self.port is None:
            return {}
        found = {}
        for name, placement in parameters.items():
            shape = placement.region.shape
            ported = self.port.port(Site(name, Kind.PARAM), len(shape))
            if ported is not None and ported.limit is not None and ported.limit < shape[0]:
                found[name] = shape[0] - ported.limit
        return found


def _read_number(chunks: Iterable[nn.Module], name: str) -> int:
    """Read a whole number of the config that a model has."""
    for chunk in chunks:
        for module in chunk.modules():
            number = getattr(getattr(module, "config", None), name, None)
            if isinstance(number, int):
                return number
    raise CaptureError(f"the map needs {name}, which the model's config does not have. Give a number in its place.")
