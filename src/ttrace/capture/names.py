"""This module finds the names by which the reference would call modules and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ttrace.adapters.wrappers import canonical


def modules(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module under its canonical name; a wrapper and what it wraps share a name, and the inner one has it.

    Each chunk, a pipeline stage for instance, is the model itself as far as it goes, so `.` may come several times.
    """
    for chunk in chunks:
        found = {canonical(path): module for path, module in chunk.named_modules()}
        yield from found.items()


def buffers(chunks: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Every buffer under its canonical name."""
    return {canonical(path): buffer for chunk in chunks for path, buffer in chunk.named_buffers()}


def parameters(
    chunks: Sequence[nn.Module], known: Mapping[str, str] | None = None
) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Every parameter once, under its first canonical name, and the other names of those that have several.

    `known` are the reference's other names: a stage that holds a copy of a tied weight under one of them means it too.
    """
    first: dict[int, str] = {}
    found: dict[str, nn.Parameter] = {}
    aliases: dict[str, str] = {}
    for path, parameter in (pair for chunk in chunks for pair in chunk.named_parameters(remove_duplicate=False)):
        name = (known or {}).get(canonical(path), canonical(path))
        if id(parameter) in first:
            if name != first[id(parameter)]:
                aliases[name] = first[id(parameter)]
            continue
        first[id(parameter)] = name
        found[name] = parameter
    return found, aliases
