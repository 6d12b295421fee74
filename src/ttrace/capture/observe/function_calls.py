"""Operations: every torch function and custom autograd function that an accused module's own code calls.

An operation has its line of code, its result and the gradient of the result. Operations are recorded only for modules
that the plan names, because recording makes every call go through Python twice. A result is recorded when it is first
used: a collective that sums it in place has then run, and belongs to it.

An operation is identified by its function and a number. Where candidate and reference run the same file, operations of
the same line have the same number, so a candidate that calls more functions is still compared operation by operation.
Elsewhere operations are counted.

`GradientChanges` observes what a script does to gradients: functions and collectives that change them after the
backward pass, or in hooks.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ttrace.capture.environment import OWN, TORCH, find_line, is_of_script
from ttrace.capture.observe.events import ModuleCall, StepCounter
from ttrace.capture.observe.hooks import Hooks
from ttrace.compat import distributed as distributed_compat
from ttrace.compat import torch as torch_compat
from ttrace.layouts.ids import ROOT, Kind, is_inside
from ttrace.patches import SharedPatches
from ttrace.trace.format import Operation

OnResult = Callable[[ModuleCall, Kind, str, torch.Tensor], None]
Operations = Mapping[str, Sequence[Operation]]
"""By module, the operations of its first call."""
_SILENT = frozenset({"__get__", "__set__", "register_hook", "detach", "requires_grad_"})
"""Functions that compute nothing."""
INPUT = "input"
"""The name of an operand that is an input of the module."""


@dataclass
class _Issued:
    """An operation of a call that runs."""

    slot: str
    source: str
    takes: tuple[str, ...]
    result: torch.Tensor | None
    """The result, until it is used."""
    is_new: bool
    backward: str = ""
    """The line of its backward, if it is a custom autograd function."""
    collectives: list[int] = field(default_factory=list)

    def as_operation(self) -> Operation:
        return Operation(
            slot=self.slot,
            source=self.source,
            takes=self.takes,
            is_view=not self.is_new,
            backward=self.backward,
            collectives=tuple(self.collectives),
        )


class FunctionCalls(TorchFunctionMode):
    """Observer of the operations of the named modules, while the mode is entered."""

    def __init__(
        self,
        modules: Sequence[str],
        parameters: Mapping[str, torch.Tensor],
        known: Operations,
        hooks: Hooks,
        clock: StepCounter,
        on_result: OnResult,
    ) -> None:
        """Set up an observer; `known` are the operations of the reference, for a run that follows it."""
        super().__init__()
        self._modules = frozenset(modules)
        self._parameters = {id(tensor): name for name, tensor in parameters.items()}
        self._known = known
        self._hooks = hooks
        self._clock = clock
        self._changes = GradientChanges(dict(sorted(parameters.items(), key=lambda item: not _is_in(modules, item[0]))))
        self._on_result = on_result
        self._is_paused = False
        self._outer: list[FunctionCalls | None] = []
        self._issued: dict[tuple[str, bool], list[_Issued]] = {}
        self._inside: list[int] | None = None
        """The collectives of the custom autograd function whose forward runs."""
        self._call: ModuleCall | None = None
        self._numbers: _Numbers | None = None
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    @property
    def operations(self) -> dict[str, tuple[Operation, ...]]:
        """By module, the operations of its first call, in order; by parameter, the changes of its gradient."""
        first = ((name, issued) for (name, is_first), issued in self._issued.items() if is_first)
        own = {name: tuple(each.as_operation() for each in issued) for name, issued in first}
        return {**self._changes.operations, **own}

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Ignore functions in this block: it is not the module's own code, but that of probes, which compute too.

        Gradients may arrive while a module's call is still open. Results so far are recorded first, because they are
        about to be used.
        """
        if not self._is_paused:
            self._show_all()
        with self._paused():
            yield

    def on_collective(self, name: str, source: str, order: int, tensors: list[torch.Tensor]) -> None:
        """Add a collective to the operation whose result it changes, or that made what it takes."""
        if not self._modules:
            return
        if self._is_script_running():
            with self._paused():
                self._changes.on_collective(name, source, order, tensors)
        if self._inside is not None:
            self._inside.append(order)
            return
        memory = {torch_compat.read_memory(tensor) for tensor in tensors} - {0}
        for issued in self._list_issued():
            if issued.result is not None and torch_compat.read_memory(issued.result) in memory:
                issued.collectives.append(order)

    def __enter__(self) -> FunctionCalls:
        _patches.acquire()
        self._outer.append(_current.calls)  # a stack, because the mode is entered again in each backward pass
        _current.calls = self
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's has no types
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's has no types
        _current.calls = self._outer.pop()
        _patches.release()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "backward":
            self._hooks.root = None
            with torch_compat.enter_in_engine(self):  # a mode is left while it handles a function
                return func(*args, **kwargs)
        if self._is_paused or not name or name in _SILENT or _is_called_by_us():
            return func(*args, **kwargs)
        call = self._find_call()
        if call is None:
            result = func(*args, **kwargs)
            if self._is_script_running() and not _is_clipping():
                with self._paused():
                    self._changes.on_function(name, _find_line(), (args, kwargs), result)
            return result
        takes = self._use(call, (args, kwargs))
        result = func(*args, **kwargs)
        self._add(name, takes, result)
        return result

    def apply(self, function: type[torch.autograd.Function], run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a custom autograd function as one operation, whatever its forward calls."""
        call, name = self._find_call(), distributed_compat.FUNCTIONS.get(function.__name__, function.__name__)
        if call is None:
            result = run(*args, **kwargs)
            if not self._is_paused and torch_compat.is_in_backward():
                self._changes.on_function(name, _find_line(), (args, kwargs), result)
            return result
        takes = self._use(call, (args, kwargs))
        collectives: list[int] = []
        outer, self._is_paused, self._inside = self._is_paused, True, collectives
        try:
            result = run(*args, **kwargs)
        finally:
            self._is_paused, self._inside = outer, None
        backward = find_line(function.backward)
        self._add(name, takes, result, backward if is_of_script(_file_of(backward)) else _find_line(), collectives)
        return result

    def _find_call(self) -> ModuleCall | None:
        """Find the call that runs now, if its operations are recorded."""
        if self._is_paused:
            return None
        call = self._hooks.innermost() or self._find_root()
        return None if call is None or call.again or call.name not in self._modules else call

    def _find_root(self) -> ModuleCall | None:
        """Find the model's last call: until the backward pass begins, the script's code counts as the model's own."""
        if torch_compat.is_in_backward():
            self._hooks.root = None
        return None if self._clock.is_in_update else self._hooks.root

    def _is_script_running(self) -> bool:
        """Whether the script's own code runs in or after a backward pass, before the optimizer steps."""
        is_in_model = self._hooks.innermost() is not None and not torch_compat.is_in_backward()
        return not is_in_model and not self._clock.is_in_update

    @contextmanager
    def _paused(self) -> Iterator[None]:
        outer, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = outer

    def _use(self, call: ModuleCall, value: Any) -> tuple[str, ...]:
        """Record results that an operation is about to use; return the names of all that it takes."""
        self._enter(call)
        taken = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        names = (self._find_name(call, tensor) for tensor in taken)
        used = {id(tensor) for tensor in taken}
        for issued in self._list_issued():
            if issued.result is not None and id(issued.result) in used:
                self._show(issued)
        return tuple(dict.fromkeys(filter(None, names)))

    def _enter(self, call: ModuleCall) -> None:
        """Begin to number the operations of another call."""
        if call is not self._call:
            self._show_all()
            self._call = call
            self._numbers = _Numbers(self._known.get(call.name, ()))
            self._made.clear()

    def _add(
        self, name: str, takes: tuple[str, ...], value: Any, backward: str = "", collectives: Sequence[int] = ()
    ) -> None:
        assert self._numbers is not None
        source = _find_line()
        for result in pytree.tree_leaves(value):
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                slot = self._numbers.choose(name, source)
                is_new = bool(backward) or not torch_compat.is_view(result)
                self._made[id(result)] = weakref.ref(result), slot
                self._list_issued().append(_Issued(slot, source, takes, result, is_new, backward, [*collectives]))

    def _list_issued(self) -> list[_Issued]:
        """List the operations of the call that runs; those of a module's first call are kept until the end."""
        call = self._call
        if call is None:
            return []
        is_first = (call.step, call.microbatch, call.number) == (0, 0, 0)
        return self._issued.setdefault((call.name, is_first), [])

    def _find_name(self, call: ModuleCall, tensor: torch.Tensor) -> str:
        """Find what made a tensor: an operation of this call, an input, or a parameter; empty if it is not known."""
        made, slot = self._made.get(id(tensor), (None, ""))
        if made is not None and made() is tensor:
            return slot
        if any(tensor is each for each in call.inputs.values()):
            return INPUT
        return self._parameters.get(id(tensor), "")

    def _show_all(self) -> None:
        for issued in self._list_issued():
            self._show(issued)

    def _show(self, issued: _Issued) -> None:
        """Record a result as it is now, and its gradient when it arrives."""
        result, issued.result = issued.result, None
        call = self._call
        if result is None or call is None:
            return
        with self._paused():
            if issued.is_new:  # the values of a view have been recorded already
                self._on_result(call, Kind.CALL, issued.slot, result)
            if result.requires_grad:
                result.register_hook(lambda gradient: self._on_gradient(call, issued.slot, gradient))

    def _on_gradient(self, call: ModuleCall, slot: str, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            with self.pause():
                self._on_result(call, Kind.CALL_GRAD, slot, gradient)


class _Current(threading.local):
    """The observer of this thread."""

    calls: FunctionCalls | None = None


_current = _Current()


def _wrap_apply(original: Any) -> Any:
    """Wrap the class method that calls custom autograd functions, because function modes do not see it."""
    # Bound to `Function` it would not work for subclasses; in torch 2.15 it is not written in Python.
    unbound = inspect.getattr_static(torch.autograd.Function, "apply")

    @functools.wraps(original)
    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        run = unbound.__get__(None, cls)
        return run(*args, **kwargs) if _current.calls is None else _current.calls.apply(cls, run, args, kwargs)

    return classmethod(apply)


_patches = SharedPatches(lambda patches: patches.wrap(torch.autograd.Function, "apply", _wrap_apply))


class _Numbers:
    """The numbers of the operations of one call."""

    def __init__(self, known: Sequence[Operation]) -> None:
        self._files = {_file_of(operation.source) for operation in known}
        self._known: dict[tuple[str, str], list[str]] = {}
        for operation in known:
            name = operation.slot.rpartition(".")[0]
            self._known.setdefault((name, operation.source), []).append(operation.slot)
        self._taken: set[str] = set()

    def choose(self, name: str, source: str) -> str:
        """Choose the slot of the reference's operation at the same line; count where it ran a different file."""
        slot = next(slot for slot in self._list_slots(name, source) if slot not in self._taken)
        self._taken.add(slot)
        return slot

    def _list_slots(self, name: str, source: str) -> Iterator[str]:
        if self._files and _file_of(source) in self._files:
            yield from self._known.get((name, source), ())
            name = f"own-{name}"  # the reference has no such operation
        for number in itertools.count():
            yield f"{name}.{number}"


def _is_in(modules: Sequence[str], parameter: str) -> bool:
    return any(module != ROOT and is_inside(parameter, module) for module in modules)


def _file_of(source: str) -> str:
    return source.rpartition(":")[0]


def _list_files() -> Iterator[tuple[str, int]]:
    """List the files and lines of the calls that led here, the innermost first, without those in this file."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _find_line() -> str:
    """Find the line of the script that called the function: in the module's own code, or where the module is called."""
    return next((f"{file}:{line}" for file, line in _list_files() if is_of_script(file)), "")


def _is_called_by_us() -> bool:
    """Whether TTrace itself called the function, as it does to compute and compare what it records."""
    outside = (file for file, _ in _list_files() if not file.startswith((TORCH, "<")))
    return next(outside, "").startswith(OWN)


def _is_clipping() -> bool:
    """Whether torch clips gradients now, which is not a change to report: they are recorded before."""
    return any(file.endswith("clip_grad.py") for file, _ in itertools.islice(_list_files(), 8))


_MOST_WATCHED = 64
"""The number of parameters that are watched, those of accused modules first: each call of the script is compared with
all of them."""


class GradientChanges:
    """Observer of the changes of some parameters' gradients.

    Parameters of modules that are not accused are watched too, to show what is usual: a change that only one parameter
    has, or that only one lacks, is not.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = dict(list(parameters.items())[:_MOST_WATCHED])
        self._changes: dict[str, dict[Operation, None]] = {}

    @property
    def operations(self) -> dict[str, tuple[Operation, ...]]:
        """By parameter, the changes of its gradient, in order; a line that changes it again counts once."""
        return {name: tuple(changes) for name, changes in self._changes.items()}

    def on_function(self, name: str, source: str, taken: Any, result: Any) -> None:
        """Keep a function that changes a gradient in place or, in a hook, makes a new gradient from it."""
        if name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
            self._keep(name, source, self._find_holders(_list_tensors(taken)))
        elif _list_tensors(result):
            self._keep(name, source, self._find_arriving())

    def on_collective(self, name: str, source: str, order: int, tensors: list[torch.Tensor]) -> None:
        """Keep a collective that changes a gradient."""
        self._keep(name, source, {*self._find_holders(tensors), *self._find_arriving()}, (order,))

    def _keep(self, name: str, source: str, parameters: Any, collectives: tuple[int, ...] = ()) -> None:
        for parameter in parameters if source else ():
            change = Operation(slot=f"{name}.0", source=source, collectives=collectives)
            changes = self._changes.setdefault(parameter, {})
            changes.pop(change, None)  # the last time counts
            changes[change] = None

    def _find_holders(self, tensors: list[torch.Tensor]) -> Iterator[str]:
        """Find the parameters whose gradients share memory with a tensor."""
        memory = {torch_compat.read_memory(_to_local(tensor)) for tensor in tensors} - {0}
        for name, parameter in self._parameters.items() if memory else ():
            if parameter.grad is not None and torch_compat.read_memory(_to_local(parameter.grad)) in memory:
                yield name

    def _find_arriving(self) -> Iterator[str]:
        """Find the parameter whose gradient is about to arrive: its hooks run, but its gradient is not set yet."""
        arriving = torch_compat.read_arriving()
        return (name for name, parameter in self._parameters.items() if parameter is arriving)


def _list_tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _to_local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
