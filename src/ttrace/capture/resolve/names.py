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
"""The canonical name of what lies at a path of a chunk."""


def name_by_path(chunk: nn.Module, path: str) -> str:
    """The name that needs nothing but the path."""
    return find_canonical_name(path, chunk)


@dataclass(frozen=True)
class Names:
    """What these chunks hold, by canonical name."""

    chunks: Sequence[nn.Module]
    naming: NamePath = name_by_path

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module; a wrapper and what it wraps share a name, and the inner one has it.

        Each chunk, a pipeline stage for instance, is the model itself as far as it goes, so `.` may come several times.
        """
        for chunk in self.chunks:
            modules = {self.naming(chunk, path): module for path, module in chunk.named_modules()}
            yield from modules.items()

    def find_repeated(self) -> frozenset[str]:
        """The names that several chunks have: the model's own, and what each chunk has a copy of."""
        counts = Counter(name for name, _ in self.modules())
        return frozenset(name for name, count in counts.items() if count > 1)

    def list_table_lengths(self) -> frozenset[int]:
        """The lengths of all embeddings, torch's own and what calls its length alike."""
        lengths = (getattr(module, "num_embeddings", None) for _, module in self.modules())
        return frozenset(length for length in lengths if isinstance(length, int))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer."""
        buffers: dict[str, torch.Tensor] = {}
        for chunk in self.chunks:
            buffers.update(self._name_tensors(chunk, chunk.named_buffers()))
        return buffers

    def parameters(self, known: Mapping[str, str] | None = None) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
        """Every parameter once, under its first name, and the other names of those that have several.

        `known` are the reference's other names: a stage that holds a copy of a tied weight under one means it too.
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
        """Each with its name; two tensors of one chunk may not have one name."""
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
