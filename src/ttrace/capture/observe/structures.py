"""Structured values, such as tuples, dicts and a library's outputs, and the names of what is in them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.utils import _pytree as pytree

from ttrace.layouts.ids import encode_name

KeyPath = tuple[Any, ...]
"""Keys from the outside to the inside, as pytree or the structure itself has them."""


def flatten_with_paths(value: Any) -> list[tuple[KeyPath, Any]]:
    """Return every leaf with its path, in the order of `tree_flatten`.

    A library may register a type without saying what its children are called, as transformers 4 does with its outputs.
    Their names are then the keys of a mapping, or numbers.
    """
    leaves: list[tuple[KeyPath, Any]] = []
    for path, leaf in pytree.tree_flatten_with_path(value, is_leaf=_has_unnamed_children)[0]:
        if _has_unnamed_children(leaf):
            children = pytree.SUPPORTED_NODES[type(leaf)].flatten_fn(leaf)[0]
            for key, child in zip(_list_keys(leaf, len(children)), children, strict=True):
                leaves += [((*path, key, *inner), tensor) for inner, tensor in flatten_with_paths(child)]
        else:
            leaves.append((path, leaf))
    return leaves


def name_slot(path: KeyPath) -> str:
    """Return a path in a structured value as a slot."""
    words = (str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
    return encode_name(".".join(words))


def is_unknown_mapping(value: Any) -> TypeGuard[MutableMapping[str, Any]]:
    """Whether this is a mapping that pytree takes for a leaf, as the batches of transformers' tokenizers are."""
    return isinstance(value, MutableMapping) and type(value) not in pytree.SUPPORTED_NODES


def has_tensors(value: Any) -> bool:
    """Whether there is a tensor in a structured value."""
    leaves = pytree.tree_leaves(dict(value) if is_unknown_mapping(value) else value)
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _has_unnamed_children(value: Any) -> bool:
    node = pytree.SUPPORTED_NODES.get(type(value))
    return node is not None and node.flatten_with_keys_fn is None


def _list_keys(value: Any, num_children: int) -> Sequence[Any]:
    return list(value) if isinstance(value, Mapping) and len(value) == num_children else range(num_children)
