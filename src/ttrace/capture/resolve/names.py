"""Names that the reference has for modules and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from ttrace.adapters.wrappers import find_canonical_name
from ttrace.errors import CaptureError

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
NamePath = Callable[[nn.Module, str], str]
"""A function that returns the canonical name of what lies at a path of a chunk."""


def name_by_path(chunk: nn.Module, path: str) -> str:
    """Name what lies at a path by the path alone, as an adapter without names of its own does."""
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
                    f"{other} and {path} of {type(chunk).__name__} would both be called {name}, so that one of them "
                    "would not be traced. Rename one of them in the model."
                )
            yield name, tensor
