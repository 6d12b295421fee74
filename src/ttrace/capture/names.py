"""This module finds the names by which the reference would call modules and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ttrace.adapters.wrappers import canonical

Naming = Callable[[nn.Module, str], str]
"""The canonical name of what lies at a path of a chunk."""


def by_path(chunk: nn.Module, path: str) -> str:  # noqa: ARG001
    """The name that needs nothing but the path."""
    return canonical(path)


@dataclass(frozen=True)
class Names:
    """What these chunks hold, by canonical name."""

    chunks: Sequence[nn.Module]
    naming: Naming = by_path

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module; a wrapper and what it wraps share a name, and the inner one has it.

        Each chunk, a pipeline stage for instance, is the model itself as far as it goes, so `.` may come several times.
        """
        for chunk in self.chunks:
            found = {self.naming(chunk, path): module for path, module in chunk.named_modules()}
            yield from found.items()

    def repeated(self) -> frozenset[str]:
        """The names that several chunks have: the model's own, and what each chunk has a copy of."""
        found = Counter(name for name, _ in self.modules())
        return frozenset(name for name, times in found.items() if times > 1)

    def tables(self) -> frozenset[int]:
        """The lengths of all embeddings, torch's own and what calls its length alike."""
        found = (getattr(module, "num_embeddings", None) for _, module in self.modules())
        return frozenset(length for length in found if isinstance(length, int))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer."""
        found = ((chunk, *pair) for chunk in self.chunks for pair in chunk.named_buffers())
        return {self.naming(chunk, path): buffer for chunk, path, buffer in found}

    def parameters(self, known: Mapping[str, str] | None = None) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
        """Every parameter once, under its first name, and the other names of those that have several.

        `known` are the reference's other names: a stage that holds a copy of a tied weight under one means it too.
        """
        first: dict[int, str] = {}
        found: dict[str, nn.Parameter] = {}
        aliases: dict[str, str] = {}
        pairs = ((chunk, *pair) for chunk in self.chunks for pair in chunk.named_parameters(remove_duplicate=False))
        for chunk, path, parameter in pairs:
            own = self.naming(chunk, path)
            name = (known or {}).get(own, own)
            if id(parameter) in first:
                if name != first[id(parameter)]:
                    aliases[name] = first[id(parameter)]
                continue
            first[id(parameter)] = name
            found[name] = parameter
        return found, aliases
