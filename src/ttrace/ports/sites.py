"""Sites of a traced step, with all layers taken together: what a map can speak of."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ttrace.layouts.ids import ROOT, Kind, drop_layers
from ttrace.layouts.region import Shape
from ttrace.trace.reader import Trace

ACTIVATIONS = (Kind.INPUT, Kind.OUTPUT, Kind.DECISION)


@dataclass
class Sites:
    """The modules, parameters and buffers of a run, by pattern; each with the shapes of one of its layers."""

    modules: dict[str, dict[Kind, dict[str, Shape]]] = field(default_factory=dict)
    """By kind and slot."""
    parameters: dict[str, Shape] = field(default_factory=dict)
    buffers: dict[str, Shape] = field(default_factory=dict)
    numbers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The last number in each parameter's name, such as that of an expert."""
    kinds: set[Kind] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    """The buffers that the step changes."""

    @classmethod
    def read(cls, trace: Trace) -> Sites:
        """Read the sites of the first step's first microbatch."""
        sites = cls()
        for tensor_id, shards in trace.shards.items():
            region = shards[0].record.region
            shape = shards[0].record.shape if region is None else region.shape
            pattern, kind, slot = drop_layers(tensor_id.name), tensor_id.kind, tensor_id.site.slot
            if tensor_id.step or tensor_id.microbatch not in (0, None):
                continue
            sites.kinds.add(kind)
            if kind is Kind.PARAM:
                sites.parameters.setdefault(pattern, shape)
                sites.numbers[pattern] |= {word for word in tensor_id.name.split(".")[-3:] if word.isdecimal()}
            elif kind is Kind.BUFFER:
                sites.buffers.setdefault(pattern, shape)
                after = trace.shards.get(tensor_id.at(Kind.BUFFER_AFTER))
                if after is not None and not shards[0].tensor().equal(after[0].tensor()):
                    sites.changed.add(pattern)
            elif kind in ACTIVATIONS and not slot.endswith("scores"):
                sites.modules.setdefault(pattern, {}).setdefault(kind, {}).setdefault(slot, shape)
        return sites

    @property
    def around_layers(self) -> str:
        """The module that has the layers."""
        layers = (pattern for pattern in self.modules if pattern.split(".")[-1:] == ["*"])
        first = min(layers, key=len, default="")
        return ".".join(first.split(".")[:-2]) or ROOT
