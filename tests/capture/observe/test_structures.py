"""What is in a structured value has a name, whoever registered its type."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from ttrace.capture.observe.structures import flatten_with_paths, name_slot


class Output(OrderedDict[str, Any]):
    """A library's output; it registers how to flatten it, but not what the parts are called."""


class Pair(NamedTuple):
    first: Any
    second: Any


class Box:
    def __init__(self, *contents: Any) -> None:
        self.contents = list(contents)


pytree.register_pytree_node(
    Output,
    lambda value: (list(value.values()), list(value)),
    lambda values, keys: Output(zip(keys, values, strict=True)),
)
pytree.register_pytree_node(Box, lambda box: (box.contents, None), lambda values, _: Box(*values))


def names(value: Any) -> dict[str, Any]:
    return {name_slot(path): leaf for path, leaf in flatten_with_paths(value)}


def test_children_without_names_have_those_of_a_mapping_or_numbers() -> None:
    assert names(Output(loss=1, hidden=(2, 3))) == {"loss": 1, "hidden.0": 2, "hidden.1": 3}
    assert names({"a": Box(1, Output(loss=2))}) == {"a.0": 1, "a.1.loss": 2}


def test_other_structures_are_named_as_torch_names_them() -> None:
    assert names({"x": [1, Pair(2, 3)]}) == {"x.0": 1, "x.1.first": 2, "x.1.second": 3}


def test_leaves_come_in_the_order_in_which_torch_puts_them_back() -> None:
    value = (1, Output(b=2, a=Box(3, 4)), {"z": 5, "y": 6})
    assert [leaf for _, leaf in flatten_with_paths(value)] == pytree.tree_leaves(value)
