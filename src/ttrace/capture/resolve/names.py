"""Names of modules and parameters: in the model, in the reference, and in a port, where the two implementations differ.

The module also lists a model's modules before anything runs, and switches dropout off.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from ttrace.adapters.wrappers import find_canonical_name
from ttrace.capture.plan import Plan
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.compat.torch import is_dropout
from ttrace.errors import CaptureError
from ttrace.layouts.ids import Kind, Site, TensorId
from ttrace.layouts.placement import Placement
from ttrace.layouts.region import Shape
from ttrace.patches import Patches
from ttrace.ports.port import Port, Side
from ttrace.trace.format import ModuleInfo

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
NamePath = Callable[[nn.Module, str], str]
"""A function that returns the canonical name of the module or tensor at a path of a chunk."""


def name_by_path(chunk: nn.Module, path: str) -> str:
    """Name a module or tensor by its path alone, for adapters without names of their own."""
    return find_canonical_name(path, chunk)


@dataclass(frozen=True)
class Names:
    """The modules, parameters and buffers of these chunks, by canonical name."""

    chunks: Sequence[nn.Module]
    naming: NamePath = name_by_path

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module; a wrapper and the module in it share a name, which stands for the inner one.

        Each chunk, for instance a pipeline stage, counts as the model itself, so `.` may come several times.
        """
        for chunk in self.chunks:
            modules = {self.naming(chunk, path): module for path, module in chunk.named_modules()}
            yield from modules.items()

    def find_repeated(self) -> frozenset[str]:
        """Find the names that several chunks have: the model's own, and those of modules with a copy in each chunk."""
        counts = Counter(name for name, _ in self.modules())
        return frozenset(name for name, count in counts.items() if count > 1)

    def list_table_lengths(self) -> frozenset[int]:
        """List the lengths of all embeddings: torch's own, and others with an attribute `num_embeddings`."""
        lengths = (getattr(module, "num_embeddings", None) for _, module in self.modules())
        return frozenset(length for length in lengths if isinstance(length, int))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return every buffer by name."""
        buffers: dict[str, torch.Tensor] = {}
        for chunk in self.chunks:
            buffers.update(self._name_tensors(chunk, chunk.named_buffers()))
        return buffers

    def parameters(self, known: Mapping[str, str] | None = None) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
        """Return every parameter once, under its first name, and the other names of tied parameters.

        `known` are the reference's other names of tied weights: a stage may hold its copy under such a name.
        """
        first: dict[int, str] = {}
        parameters: dict[str, nn.Parameter] = {}
        aliases: dict[str, str] = {}
        named_tensors = (
            self._name_tensors(chunk, chunk.named_parameters(remove_duplicate=False)) for chunk in self.chunks
        )
        for own, parameter in chain.from_iterable(named_tensors):
            name = (known or {}).get(own, own)
            if id(parameter) in first:
                if name != first[id(parameter)]:
                    aliases[name] = first[id(parameter)]
                continue
            first[id(parameter)] = name
            parameters[name] = parameter
        return parameters, aliases

    def _name_tensors(
        self, chunk: nn.Module, named_tensors: Iterable[tuple[str, _Tensor]]
    ) -> Iterator[tuple[str, _Tensor]]:
        """Yield each tensor with its name; refuse two tensors of one chunk with the same name."""
        known: dict[str, tuple[str, _Tensor]] = {}
        for path, tensor in named_tensors:
            name = self.naming(chunk, path)
            other, same = known.setdefault(name, (path, tensor))
            if same is not tensor:
                raise CaptureError(
                    f"{other} and {path} of {type(chunk).__name__} would both be called {name}, so one of them would "
                    "not be traced. Rename one of them in the model."
                )
            yield name, tensor


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
    """The names of modules and parameters in a trace: their own or, in a port between two implementations, the
    candidate's."""

    port: Port | None

    def rename(self, name: str) -> str:
        """Return the name of a module or parameter or, if it is a part, the name of the whole."""
        return name if self.port is None else self.port.rename(name)

    def rename_all(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self.rename, names)))

    def rename_keys(self, table: Mapping[str, _Value]) -> dict[str, _Value]:
        """Rename the keys of a table; the parts of a whole become one entry."""
        return {self.rename(name): each for name, each in table.items()}

    def notes(self) -> list[str]:
        """Return a note about the sites that the map ignores, if there are any."""
        ignored = list(self.port.ignored) if self.port is not None else []
        return [f"the map ignores {len(ignored)} sites, the first is {ignored[0]}"] if ignored else []

    def find_padding(self, parameters: Mapping[str, Placement]) -> dict[str, int]:
        """Find how many rows of each parameter are padding, given placements under this side's names."""
        if self.port is None:
            return {}
        padding = {}
        for name, placement in parameters.items():
            shape = placement.region.shape
            ported = self.port.port(Site(name, Kind.PARAM), len(shape))
            if ported is not None and ported.limit is not None and ported.limit < shape[0]:
                padding[name] = shape[0] - ported.limit
        return padding


def _read_number(chunks: Iterable[nn.Module], name: str) -> int:
    """Read an integer of the model's config."""
    for chunk in chunks:
        for module in chunk.modules():
            number = getattr(getattr(module, "config", None), name, None)
            if isinstance(number, int):
                return number
    raise CaptureError(f"the map needs {name}, which the model's config does not have. Give a number in its place.")


def list_modules(names: Names) -> dict[str, ModuleInfo]:
    """List every module with its class, the file and line where that class is defined, and its settings."""
    infos: dict[tuple[type, tuple[tuple[str, str], ...]], ModuleInfo] = {}  # many modules have the same
    found = {}
    for name, module in names.modules():
        kind: type = type(module)
        key = (kind, _read_settings(module))
        if key not in infos:
            infos[key] = _describe_class(kind).model_copy(update={"settings": dict(key[1])})
        found[name] = infos[key]
    return found


def switch_dropout_off(names: Names, patches: Patches) -> list[str]:
    """Set every dropout's p to 0 until the patches are removed: random masks differ between layouts.

    Return the names of the modules.
    """
    changed = []
    for name, module in names.modules():
        if is_dropout(module) and module.p > 0:  # type: ignore[operator]  # every dropout has it
            patches.replace(module, "p", 0.0)
            changed.append(name)
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout > 0:
            patches.replace(module, "dropout", 0.0)
            changed.append(name)
        elif getattr(module, "hidden_dropout", 0.0):  # Megatron's layers apply dropout between their modules
            patches.replace(module, "hidden_dropout", 0.0)
            changed.append(name)
    return changed


_parsing = threading.Lock()
"""Python 3.11 fails when two threads parse at once, and ranks may be threads."""


@cache
def _describe_class(kind: type) -> ModuleInfo:
    try:
        with _parsing:
            source = f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        source = ""
    return ModuleInfo(type=f"{kind.__module__}.{kind.__qualname__}", source=source)


_OF_MODULES = ("p", "dropout", "eps", "momentum", "negative_slope", "alpha", "beta", "approximate")
"""Settings of torch's modules that decide values, now or later."""
_OF_TRAINING = ("p", "dropout", "momentum")
"""Settings of modules that training mode changes."""
_OWN_CLASSES = ("torch.nn.", "torch.distributed.")
"""The modules of torch's own classes; FSDP2 makes classes of its own from them."""


def _read_settings(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Read a module's settings: of torch's own modules those of a list, of a user's module its public floats."""
    own = vars(module)
    if not type(module).__module__.startswith(_OWN_CLASSES):
        return tuple(
            (key, format_setting(value)) for key, value in own.items() if type(value) is float and key[0] != "_"
        )
    keys = [key for key in _OF_MODULES if key in own and (own[key] is None or isinstance(own[key], (int, float, str)))]
    if "momentum" in keys and not own.get("track_running_stats", True):
        keys.remove("momentum")
    return tuple((key, format_setting(own[key])) for key in keys)


def find_evaluated(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Find the modules of torch that training mode changes, and that are not in it."""
    return tuple(
        name
        for name, module in modules.items()
        if not module.training
        and type(module).__module__.startswith(_OWN_CLASSES)
        and any(hasattr(module, key) for key in _OF_TRAINING)
    )


def format_setting(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(format_setting, value))})"
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return f"{float(value):g}" if isinstance(value, (int, float)) else str(value)
