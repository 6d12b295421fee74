"""Private APIs of torch, all in one place.

TTrace needs some features that torch does not offer publicly. Each entry names the first version of torch that has it,
and what happens without it. Other modules of this package do not use attributes or modules of torch that begin with an
underscore, except for `_pytree`, `_parameters` and `_modules` (tests/test_private_apis.py checks this). Heavy parts of
torch are imported inside functions, because `import ttrace` must be cheap.

"Since 2.6" means that the oldest supported version has it. `LIMITS` lists what does not work in older versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
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
"""Major and minor version of the running torch: it decides which API is used if torch has a new one since a version."""

# Autograd


def is_in_backward() -> bool:
    """Return whether this thread runs inside the autograd engine: a forward that does is a recomputation.

    `torch._C._current_graph_task_id`, since 2.6. Without it recomputations would be recorded as second calls.
    """
    return torch._C._current_graph_task_id() != -1


def read_arriving() -> Any:
    """Return the parameter whose gradient arrives while this thread runs its hooks; None elsewhere.

    `torch._C._current_autograd_node`, since 2.6. Without it, changes of gradients in hooks are not attributed to
    parameters.
    """
    return getattr(torch._C._current_autograd_node(), "variable", None)


@contextmanager
def enter_in_engine(mode: Any) -> Iterator[None]:
    """Enter a mode while the autograd engine runs in this block, so that it sees the functions that hooks call.

    `torch.autograd._engine_run_backward`, since 2.6. Without it, operations of hooks on gradients have no source line.
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
    """Return the number that the next autograd node of this thread gets.

    `torch.autograd._get_sequence_nr`, since 2.6. Without it a module's own input gradients cannot be
    distinguished from those of other consumers, and are not recorded.
    """
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # missing in the stubs
    return number


def read_node_number(node: Node) -> int:
    """Return the sequence number of an autograd node: `Node._sequence_nr`, since 2.6. See `read_sequence_nr`."""
    return node._sequence_nr()


def will_run(node: Node) -> bool:
    """Return whether the backward pass that runs now will still run this node.

    `torch._C._will_engine_execute_node`, since 2.6. Without it TTrace would wait for gradients that are not computed.
    """
    return bool(torch._C._will_engine_execute_node(node))


# Tensors


def is_view(tensor: torch.Tensor) -> bool:
    """`Tensor._is_view`, since 2.6. Without it views would be recorded as results of functions."""
    return tensor._is_view()


def read_memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none, as a wrapper of other tensors.

    `Tensor.untyped_storage`, in all versions. Without it collectives are not attributed to operations.
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def read_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place: `Tensor._version`, since 2.6.

    Without it, writes to buffers that a collective still uses are not noticed.
    """
    return tensor._version


def read_sparse_rows(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row numbers and the rows of a sparse gradient, as they are, whether coalesced or not.

    `Tensor._indices` and `Tensor._values`, since 2.6; the public methods coalesce first. Without them a streamed
    embedding's gradient would be summed in a different order.
    """
    return gradient._indices()[0], gradient._values()


def make_wrapper_subclass(cls: type[torch.Tensor], like: torch.Tensor, device: torch.device) -> Any:
    """Return a tensor of this class with the geometry of another, and without data.

    `Tensor._make_wrapper_subclass`, since 2.6. Without it references cannot be streamed by operators.
    """
    geometry: dict[str, Any] = {"strides": like.stride(), "storage_offset": like.storage_offset()}
    return torch.Tensor._make_wrapper_subclass(cls, like.shape, **geometry, dtype=like.dtype, device=device)


def outside_function_modes() -> AbstractContextManager[Any]:
    """Return a context without any `__torch_function__`, including that of modes of the script.

    Such a mode may give tensors a device, or check their types as spmd_types does. It must not apply to computations of
    TTrace. `torch._C.DisableTorchFunction`, since 2.6. Without it a type checker rejects them.
    """
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunction())


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a block whose operators on plain tensors go through no mode, since 2.6. Without it twins take longer."""
    return cast("AbstractContextManager[Any]", torch._C._DisableTorchDispatch())


def without_torch_function() -> AbstractContextManager[Any]:
    """Return a block without subclasses' `__torch_function__`, since 2.6. Without it a streamed tensor calls itself."""
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunctionSubclass())


class DispatchMode(TorchDispatchMode):
    """A mode that operators go through, since 2.6. Without it twins are only nudged.

    Higher-order operators (flex attention) and what they compile bypass it: by flags since 2.10, by rules before.
    """

    supports_higher_order_operators = True
    ignore_compile_internals = classmethod(lambda _cls: True)

    def __enter__(self) -> Any:
        if RELEASE < (2, 10):
            for each in torch._ops._higher_order_ops.values():
                each.python_key_table.setdefault(type(self), lambda _mode, *args, op=each, **kw: op(*args, **kw))
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's own


def read_arguments(operator: Any) -> Sequence[Any]:
    """Return the declared arguments of an operator: `OpOverload._schema`, since 2.6.

    Without it a write to a streamed parameter would be lost silently.
    """
    arguments: Sequence[Any] = operator._schema.arguments
    return arguments


TO_COPY = torch.ops.aten._to_copy.default
"""The operator that copies to another dtype or device, since 2.6. Without it autocast would copy all weights."""

# Modules


def read_own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers by name, to be changed in place: `Module._buffers`, since 2.6.

    Without it a buffer that a module replaces could not be restored.
    """
    return module._buffers


def is_dropout(module: nn.Module) -> bool:
    """`nn.modules.dropout._DropoutNd`, since 2.6. Without it dropout would have to be named class by class."""
    return isinstance(module, nn.modules.dropout._DropoutNd)


WRAPPER_ATTRIBUTES = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
"""Attributes in which wrappers store the wrapped module: DDP, torch.compile, FSDP1, activation checkpointing (all since
2.6), Lightning's strategies. Without them names of wrapped modules have a level that the reference does not have."""

COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which `module.compile()` stores the compiled call, since 2.6. Without it its insides are traced."""


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return what `torch.compile(module)` wraps, or the module itself: `OptimizedModule._orig_mod`, since 2.6.

    Without it DDP inside compiled modules is not recognised.
    """
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def has_compiled_forward(module: nn.Module) -> bool:
    """Return whether dynamo compiles this forward: `_torchdynamo_orig_callable` and `_torchdynamo_disable`, since 2.6.

    Without them modules inside a compiled forward are traced.
    """
    forward = module.forward
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)


DYNAMO = "torch._dynamo"
"""The module that is loaded if torch.compile was called, since 2.6; loading it takes seconds."""

GENERATED_MODULE = "_remote_module_non_scriptable"
"""A module that torch itself writes into a temporary folder when `torch.distributed.nn` is imported, since 2.6. Without
this name, every trace would count as stale after its process has ended, because the file is deleted."""

# Functions that are patched: an owner and an attribute


def find_total_norm() -> tuple[ModuleType, str]:
    """Return what `clip_grad_norm_` calls to take the norm: `clip_grad._get_total_norm`, since 2.6.

    The public `get_total_norm` is another name of it, which scripts may use. Without it gradients are recorded when
    they are clipped.
    """
    from torch.nn.utils import clip_grad

    return clip_grad, "_get_total_norm"


def find_clip_cell() -> CellType:
    """Return the cell in which torch's decorator stores the clipping function: a patch there applies to all its names.

    `clip_grad._clip_grads_with_norm_`, since 2.6. `torch.nn.utils.clip_grads_with_norm_` is another name of it, and
    scripts import that by name. Without it clipping is not recorded.
    """
    from torch.nn.utils import clip_grad

    function: Any = clip_grad._clip_grads_with_norm_
    cell: CellType = function.__closure__[function.__code__.co_freevars.index("func")]
    return cell


_scripted: list[Callable[..., Any]] = []
"""The wrappers that were passed to `let_script`. torch stores their ids, since 2.6, so they must never be freed."""


def let_script(wrapper: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Let torch.jit.script treat a wrapper as the torch function that it wraps.

    `torch.jit._builtins`, since 2.6. Without it, scripted functions that call the wrapper do not compile.
    """
    from torch.jit import _builtins

    operator = _builtins._find_builtin(function)
    if operator is not None:
        _builtins._register_builtin(wrapper, operator)
        _scripted.append(wrapper)


# Data


def find_loader_iterator() -> type[Any]:
    """Find the class whose `__next__` every iterator over a `DataLoader` inherits: `_BaseDataLoaderIter`, since 2.6.

    Without it, nothing is known of a script's loader but its batches.
    """
    from torch.utils.data import dataloader

    return dataloader._BaseDataLoaderIter


def read_loader(iterator: Any) -> tuple[Any, Any]:
    """Return the dataset of an iterator and the sampler of its batches: see `find_loader_iterator`."""
    return iterator._dataset, iterator._index_sampler


def make_fetch(iterator: Any) -> Callable[[Any], Any]:
    """Make a function that returns the batch of some indices of a map-style dataset, as a `DataLoader` makes it.

    Its fetcher is `_MapDatasetFetcher`, since 2.6. Without it, masks and labels are those of the measured batch.
    """
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    auto_collation, collate = iterator._auto_collation, iterator._collate_fn
    fetcher: Any = _MapDatasetFetcher(iterator._dataset, auto_collation, collate, drop_last=False)
    fetch: Callable[[Any], Any] = fetcher.fetch
    return fetch


@dataclass(frozen=True)
class Limit:
    """Something that does not work, or only partly, in old versions of torch."""

    feature: str
    below: tuple[int, int]
    """The first version, as major and minor number, without this limit."""
    reason: str
    since: tuple[int, int] = (2, 6)
    """The first version with this limit."""


LIMITS: tuple[Limit, ...] = (
    Limit("torch.distributed.pipelining", (2, 8), "its schedules hang"),
    Limit("torch.distributed.pipelining on gloo", (2, 10), "its messages have different sizes, and it crashes", (2, 9)),
    Limit("FSDP2 on CPU", (2, 7), "it crashes in torch"),
    Limit("uneven strided shards", (2, 8), "_StridedShard cuts evenly only"),
    Limit("averages of FSDP2 on CPU", (2, 9), "gloo ignores AVG, and TTrace correctly reports too large gradients"),
)
"""Limits since 2.6; `ttrace doctor` lists those of the running version."""


def list_limits(version: str = torch.__version__) -> tuple[Limit, ...]:
    """List the limits of a version of torch, such as `2.6.0+cu124`. See `LIMITS`."""
    return tuple(limit for limit in LIMITS if limit.since <= parse_release(version) < limit.below)
