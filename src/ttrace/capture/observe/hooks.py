"""Hooks on modules, which report inputs, outputs, and the gradients of both.

Inputs and outputs may be structured values, such as tuples, dicts and a library's output classes: each tensor in them
is reported under a slot, the path to it. `GradientEntry` finds the place where gradients enter the model.

Recording inserts no node into the autograd graph and uses no full backward hook: both change the order in which
gradients are summed, and so their bits (tests/capture/observe/test_hooks.py::test_recording_is_bitwise_neutral). Output
gradients come from tensor hooks set inside the forward hook; a module's own input gradient comes from the autograd
nodes that consume the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ttrace.capture.observe.events import ModuleCall, SessionEvents
from ttrace.compat import torch as torch_compat
from ttrace.layouts.ids import ROOT, Kind, encode_name

Show = Callable[[ModuleCall, Kind, str, torch.Tensor], "torch.Tensor | None"]
"""Called with a tensor that a call takes or returns, or with its gradient. A tensor that it returns replaces it.

It is not an event of the session: the way of a tensor to the disk is meant to be short
(tests/capture/test_path_to_disk.py)."""
Sources = tuple[tuple[Node | None, int], ...]
"""The nodes to which a node sends its gradients, by position: each node with the number of its output."""


class Hooks:
    """Hooks on the given modules, until `remove`."""

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        events: SessionEvents,
        show: Show,
        *,
        without_gradients: bool = False,
    ) -> None:
        """Set the hooks. Calls are reported to `events`, and their tensors to `show`.

        `without_gradients`, calls count also where gradients are off.
        """
        self._events = events
        self._show = show
        self._is_always_on = without_gradients
        self._calls: list[tuple[nn.Module, ModuleCall | None]] = []
        self._is_driven = False
        self.root: ModuleCall | None = None
        """The last call of the model itself."""
        self._handles: list[RemovableHandle] = []
        for name, module in modules:
            # Inputs last and outputs first: in between, parallelised modules still hold DTensors.
            self._handles += [
                module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True),
                module.register_forward_hook(self._after, with_kwargs=True, prepend=True),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_microbatch(self) -> None:
        """Forget all calls: recomputation stops early, with an exception, and leaves calls behind.

        If this is never called, a microbatch begins when the model is called.
        """
        self._is_driven = True
        self._calls.clear()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        with torch_compat.outside_function_modes():
            if not self._handles:  # a hook of this call has removed all; torch still calls those it had listed
                return None
            if name == ROOT and not is_recompute() and not self._is_driven:
                self._calls.clear()
            call = self._begin_call(name)
            self._calls.append((module, call))
            if name == ROOT:
                self.root = call
            if call is None:
                return None
            call.first_node = torch_compat.read_sequence_nr()
            seen, replacement = self._show_tensors(
                call, Kind.RECOMPUTE_INPUT if call.again else Kind.INPUT, (args, kwargs)
            )
            call.inputs = {slot: tensor for slot, tensor in seen.items() if tensor.requires_grad}
            call.takes_floats = any(tensor.is_floating_point() for tensor in seen.values())
            return replacement

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:  # noqa: ARG002
        with torch_compat.outside_function_modes():
            call = self._end_call(module)
            if call is None:
                return None
            seen, replacement = self._show_tensors(call, Kind.RECOMPUTE_OUTPUT if call.again else Kind.OUTPUT, output)
            if (outer := self.innermost()) is not None:
                outer.holds_floats |= call.takes_floats or any(tensor.is_floating_point() for tensor in seen.values())
            for slot, tensor in seen.items():
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._on_gradient, call, Kind.GRAD_OUTPUT, slot))
            if call.inputs and seen:
                _watch_input_gradients(call, list(seen.values()), partial(self._on_gradient, call, Kind.GRAD_INPUT))
            call.inputs = {}  # hooks keep the call until backward; it must not keep activations
            return replacement

    def _begin_call(self, name: str) -> ModuleCall | None:
        again = is_recompute()
        # Without gradients, only the first pass of a segment that is recomputed later counts; an evaluation does not.
        is_on = torch.is_grad_enabled() or self._is_always_on
        if not (is_on or again or any(call is not None for _, call in self._calls)):
            return None
        return self._events.on_call(name, again=again)

    def _end_call(self, module: nn.Module) -> ModuleCall | None:
        """Return the call that ends now. Drop calls inside it that an exception ended, as recomputation does."""
        while self._calls:
            entered, call = self._calls.pop()
            if entered is module:
                return call
        return None

    def innermost(self) -> ModuleCall | None:
        """Return the call that runs now; None if it is not watched."""
        return self._calls[-1][1] if self._calls else None

    def _show_tensors(self, call: ModuleCall, kind: Kind, value: Any) -> tuple[dict[str, torch.Tensor], Any]:
        """Report every tensor in a structured value.

        Return the tensors now in use, by slot, and the new value if a tensor was replaced.
        """
        seen: dict[str, torch.Tensor] = {}
        replacement: dict[int, torch.Tensor] = {}
        for i, (slot, leaf) in enumerate(_list_leaves(value, kind)):
            # A parameter that a module passes on, to be tied or added elsewhere, is recorded as a parameter only.
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter):
                other = self._show(call, kind, slot, leaf)
                if other is not None:
                    replacement[i] = other
                seen[slot] = leaf if other is None else other
        return seen, _replace_leaves(value, replacement) if replacement else None

    def _on_gradient(
        self, call: ModuleCall, kind: Kind, slot: str, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        # DDP passes all outputs through one node, which sends None to those that are not used
        # (tests/capture/observe/test_hooks.py::test_an_unused_output_that_gets_none_is_not_recorded).
        if gradient is None:
            return None
        return self._show(call, kind, slot, gradient)


def is_recompute() -> bool:
    """Whether a forward that runs now is a recomputation: those run inside the autograd engine."""
    return torch_compat.is_in_backward()


def _list_leaves(value: Any, kind: Kind) -> list[tuple[str, Any]]:
    """List every leaf with its path as the slot; the first positional input and a bare output have an empty slot."""
    if kind.primal is not Kind.INPUT:
        if isinstance(value, torch.Tensor):
            return [("", value)]  # most values are one tensor, and walking a tree takes longer than writing the tensor
        return [(name_slot(path), leaf) for path, leaf in flatten_with_paths(value)]
    args, kwargs = value
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
        return [("", args[0])]
    # Positional inputs are numbered, keyword inputs are named.
    named = ((name_slot(path[1:]), leaf) for path, leaf in flatten_with_paths(value))
    return [("" if slot == "0" else slot, leaf) for slot, leaf in named]


def _replace_leaves(value: Any, others: dict[int, torch.Tensor]) -> Any:
    """Return the same structure with some leaves replaced."""
    leaves, structure = pytree.tree_flatten(value)
    return pytree.tree_unflatten([others.get(i, leaf) for i, leaf in enumerate(leaves)], structure)


def _watch_input_gradients(
    call: ModuleCall, outputs: list[torch.Tensor], deliver: Callable[[str, torch.Tensor], object]
) -> None:
    """Deliver this call's own gradient of each input, without what other consumers of the same tensor add to it."""
    edges = {slot: get_gradient_edge(tensor) for slot, tensor in call.inputs.items()}
    consumers: dict[str, list[tuple[Node, int]]] = {slot: [] for slot in edges}
    for node, sources in _nodes_of_call(call, outputs, {edge.node for edge in edges.values()}):
        for position, (source, number) in enumerate(sources):
            for slot, edge in edges.items():
                if source is edge.node and number == edge.output_nr:
                    consumers[slot].append((node, position))
    for slot, nodes in consumers.items():
        if nodes:
            _sum_at(nodes, partial(deliver, slot))


def _nodes_of_call(call: ModuleCall, outputs: list[torch.Tensor], stops: set[Node]) -> Iterator[tuple[Node, Sources]]:
    """Find this call's autograd nodes, backwards from its outputs, each with the nodes that it sends gradients to."""
    start = [get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad]
    seen: set[Node] = set()
    while start:
        node = start.pop()
        if node in seen or node in stops or torch_compat.read_node_number(node) < call.first_node:
            continue
        seen.add(node)
        sources = node.next_functions  # torch builds a new tuple at each access
        yield node, sources
        start += [source for source, _ in sources if source is not None]


def _sum_at(consumers: list[tuple[Node, int]], deliver: Callable[[torch.Tensor], object]) -> None:
    """Add up the gradients that several nodes send along one edge, and deliver the sum.

    It is delivered when all nodes that run in this pass have sent theirs. A node that only leads to an unused output
    does not run (tests/capture/observe/test_hooks.py::test_an_unused_output_is_not_waited_for).
    """
    waiting = dict(enumerate({node for node, _ in consumers}))
    parts: list[torch.Tensor] = []

    def on_gradients(number: int, positions: list[int], gradients: tuple[torch.Tensor | None, ...], _: object) -> None:
        parts.extend(gradient for i in positions if (gradient := gradients[i]) is not None)
        waiting.pop(number, None)
        if parts and not any(map(torch_compat.will_run, waiting.values())):
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            parts.clear()
            deliver(total)

    for number, node in tuple(waiting.items()):
        # A number in place of the node: a hook that holds its own node is a cycle that Python cannot collect, and it
        # would keep the model alive (tests/capture/test_session.py::test_a_closed_session_lets_the_model_go).
        node.register_hook(partial(on_gradients, number, [at for other, at in consumers if other is node]))


KeyPath = tuple[Any, ...]
"""Keys from the outside to the inside, as pytree or the structure itself has them."""


def flatten_with_paths(value: Any) -> list[tuple[KeyPath, Any]]:
    """Return every leaf with its path, in the order of `tree_flatten`.

    A library may register a type without naming its children, as transformers 4 does with its outputs. Their names are
    then the keys of a mapping, or numbers.
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
    """Whether this is a mapping that pytree treats as a leaf, such as the batches of transformers' tokenizers."""
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


_MANY = 16
"""A gradient with at least this many elements is not the gradient of a loss."""


@dataclass
class _BackwardPass:
    """The state of one microbatch's backward pass."""

    seen: set[torch.Size] = field(default_factory=set)
    calls: list[ModuleCall] = field(default_factory=list)
    """The calls at whose outputs gradients entered."""
    is_inside: bool = False
    """Whether the backward pass of one of them is finished."""


class GradientEntry:
    """Detector of the place where gradients enter a twin's model: usually its logits.

    Twins must be nudged there too. The gradient of a loss is largest at the label, where a nudge of the logits hardly
    changes it. So the sums over a vocabulary that follow would round alike in all twins, but differently in a candidate
    that sums in parts (tests/capture/observe/test_hooks.py). Gradients of 16 bits are not nudged: their sums are taken
    in float32, and the rounding of these sums does not show.
    """

    def __init__(self) -> None:
        self._passes: dict[tuple[int, int], _BackwardPass] = {}

    def is_at(self, call: ModuleCall, kind: Kind, gradient: torch.Tensor) -> bool:
        """Whether gradients enter the model here; a gradient that a module shares with its last child counts once."""
        if not kind.is_activation_grad or gradient.layout is not torch.strided or gradient.numel() < _MANY:
            return False
        now = self._passes.setdefault((call.step, call.microbatch), _BackwardPass())
        if now.is_inside:
            return False
        if kind is Kind.GRAD_INPUT:
            now.is_inside = any(call is entered for entered in now.calls)
            return False
        now.calls.append(call)
        is_new = gradient.shape not in now.seen
        now.seen.add(gradient.shape)
        return is_new and gradient.dtype.itemsize >= torch.float32.itemsize
