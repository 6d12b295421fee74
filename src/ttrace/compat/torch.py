"""Private APIs of torch, all in one place.

TTrace needs some things that torch does not offer in public. Each entry says since when torch has it and what happens
without it. Nothing else in the package touches an attribute or a module of torch that begins with an underscore,
except for `_pytree`, `_parameters` and `_modules` (tests/test_private_apis.py holds that). Imports of heavy parts of
torch stand inside the functions: `import ttrace` must be cheap.

"Since 2.6" means: in the oldest version that was looked at.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CellType, ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode


def parse_release(version: str) -> tuple[int, int]:
    """Parse the major and minor number of a version; (0, 0) if it has none. See `RELEASE`."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


RELEASE = parse_release(torch.__version__)
"""Major and minor version of the torch that runs: what is since when, this file decides by it."""

# Autograd


def is_in_backward() -> bool:
    """Whether this thread runs inside the autograd engine: a forward that does is a recomputation.

    `torch._C._current_graph_task_id`, since 2.6. Without it recomputations would be recorded as second calls.
    """
    return torch._C._current_graph_task_id() != -1


def read_arriving() -> Any:
    """The parameter whose gradient arrives while this thread runs its hooks; None elsewhere.

    `torch._C._current_autograd_node`, since 2.6. Without it nobody knows which gradient a hook changes.
    """
    return getattr(torch._C._current_autograd_node(), "variable", None)


@contextmanager
def enter_in_engine(mode: Any) -> Iterator[None]:
    """Enter a mode while the autograd engine runs in this block, so that it sees the functions that hooks call.

    `torch.autograd._engine_run_backward`, since 2.6. Without it what hooks do to gradients has no line.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    autograd._engine_run_backward = run_in_mode
    try:
        yield
    finally:
        autograd._engine_run_backward = run


def read_sequence_nr() -> int:
    """The number that the next autograd node of this thread gets.

    `torch.autograd._get_sequence_nr`, since 2.6. Without it a module's own input gradients cannot be told from those
    of other consumers, and are not recorded.
    """
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # missing in the stubs
    return number


def read_node_number(node: Node) -> int:
    """The sequence number of an autograd node: `Node._sequence_nr`, since 2.6. See `read_sequence_nr`."""
    return node._sequence_nr()


def will_run(node: Node) -> bool:
    """Whether the backward pass that runs now will still run this node.

    `torch._C._will_engine_execute_node`, since 2.6. Without it a gradient that nobody uses would be waited for.
    """
    return bool(torch._C._will_engine_execute_node(node))


# Tensors


def is_view(tensor: torch.Tensor) -> bool:
    """`Tensor._is_view`, since 2.6. Without it views would be recorded as results of functions."""
    return tensor._is_view()


def read_memory(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor begins; 0 if it has none, as a wrapper of other tensors.

    `Tensor.untyped_storage`, in all versions. Without it nobody knows which operation a collective belongs to.
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def read_version(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place: `Tensor._version`, since 2.6.

    Without it nobody notes buffers that are written while a collective uses them.
    """
    return tensor._version


def read_sparse_rows(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The row numbers and the rows of a sparse gradient, as they are, whether coalesced or not.

    `Tensor._indices` and `Tensor._values`, since 2.6; the public methods coalesce first. Without them a streamed
    embedding's gradient would be summed in another order.
    """
    return gradient._indices()[0], gradient._values()


def make_wrapper_subclass(cls: type[torch.Tensor], like: torch.Tensor, device: torch.device) -> Any:
    """A tensor of this class with the geometry of another, and without data.

    `Tensor._make_wrapper_subclass`, since 2.6. Without it no reference can be streamed by operators.
    """
    geometry: dict[str, Any] = {"strides": like.stride(), "storage_offset": like.storage_offset()}
    return torch.Tensor._make_wrapper_subclass(cls, like.shape, **geometry, dtype=like.dtype, device=device)


def outside_function_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs without any `__torch_function__`, also of modes that the script is in.

    Such a mode may give tensors a device, or check their types as spmd_types does: what TTrace computes meanwhile is
    not for it. `torch._C.DisableTorchFunction`, since 2.6. Without it a type checker refuses our own functions.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """A block whose operators on plain tensors go through no mode, since 2.6. Without it twins take longer."""
    return cast("AbstractContextManager[Any]", torch._C._DisableTorchDispatch())


def without_torch_function() -> AbstractContextManager[Any]:
    """A block without subclasses' `__torch_function__`, since 2.6. Without it a streamed parameter calls itself."""
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunctionSubclass())


class DispatchMode(TorchDispatchMode):
    """A mode that operators go through, since 2.6. Without it twins are only nudged.

    Operators of operators (flex attention) and what they compile pass it by: by flags since 2.10, by rules before.
    """

    supports_higher_order_operators = True
    ignore_compile_internals = classmethod(lambda _cls: True)

    def __enter__(self) -> Any:
        if RELEASE < (2, 10):
            for each in torch._ops._higher_order_ops.values():
                each.python_key_table.setdefault(type(self), lambda _mode, *args, op=each, **kw: op(*args, **kw))
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's own


def read_arguments(operator: Any) -> Sequence[Any]:
    """The declared arguments of an operator: `OpOverload._schema`, since 2.6.

    Without it a write to a streamed parameter would be lost in silence.
    """
    arguments: Sequence[Any] = operator._schema.arguments
    return arguments


TO_COPY = torch.ops.aten._to_copy.default
"""The operator that copies to another dtype or device, since 2.6. Without it autocast would hold all weights."""

# Modules


def read_own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers by name, to be changed in place: `Module._buffers`, since 2.6.

    Without it a buffer that a module replaces could not be brought back.
    """
    return module._buffers


def is_dropout(module: nn.Module) -> bool:
    """`nn.modules.dropout._DropoutNd`, since 2.6. Without it dropout would have to be named class by class."""
    return isinstance(module, nn.modules.dropout._DropoutNd)


WRAPPER_ATTRIBUTES = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
"""Attributes under which wrappers keep what they wrap: DDP, torch.compile, FSDP1, activation checkpointing (all since
2.6), Lightning's strategies. Without them names of wrapped modules have a level that the reference does not have."""

COMPILED_CALL = "_compiled_call_impl"
"""Where `module.compile()` keeps the compiled call, since 2.6. Without it such modules are seen from inside."""


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """What `torch.compile(module)` wraps, or the module itself: `OptimizedModule._orig_mod`, since 2.6.

    Without it DDP inside compiled modules is not recognised.
    """
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def has_compiled_forward(module: nn.Module) -> bool:
    """Whether dynamo compiles this forward: `_torchdynamo_orig_callable` and `_torchdynamo_disable`, since 2.6.

    Without them modules with a compiled forward are seen from inside.
    """
    forward = module.forward
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)


DYNAMO = "torch._dynamo"
"""The module that whoever called torch.compile has loaded, since 2.6; loading it takes seconds."""

GENERATED_MODULE = "_remote_module_non_scriptable"
"""A module that torch itself writes into a temporary folder when `torch.distributed.nn` is imported, since 2.6. Without
this name a trace would be stale as soon as its process has ended, as the file is gone then."""

# Functions that are patched: an owner and an attribute


def find_total_norm() -> tuple[ModuleType, str]:
    """What `clip_grad_norm_` calls to take the norm: `clip_grad._get_total_norm`, since 2.6.

    Scripts that call the public `get_total_norm` have it under another name. Without it gradients are recorded where
    they are clipped.
    """
    from torch.nn.utils import clip_grad

    return clip_grad, "_get_total_norm"


def find_clip_cell() -> CellType:
    """The cell in which torch's decorator keeps the function that clips: a change there counts under every name.

    `clip_grad._clip_grads_with_norm_`, since 2.6. `torch.nn.utils.clip_grads_with_norm_` is another name of it, and
    scripts import that by name. Without it clipping is not recorded.
    """
    from torch.nn.utils import clip_grad

    function: Any = clip_grad._clip_grads_with_norm_
    cell: CellType = function.__closure__[function.__code__.co_freevars.index("func")]
    return cell


_scripted: list[Callable[..., Any]] = []
"""Wrappers that `let_script` was given. torch knows them by their ids, since 2.6, so they must never be freed."""


def let_script(wrapper: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Let torch.jit.script take a wrapper for the function of torch in it.

    `torch.jit._builtins`, since 2.6. Without it, scripted functions that call the wrapper do not compile.
    """
    from torch.jit import _builtins

    operator = _builtins._find_builtin(function)
    if operator is not None:
        _builtins._register_builtin(wrapper, operator)
        _scripted.append(wrapper)
