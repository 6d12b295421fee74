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
from contextlib import AbstractContextManager
from types import CellType, ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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


def find_context_parallel_buffers() -> tuple[ModuleType, str]:
    """What `context_parallel` calls to split sequences: `_attention._context_parallel_buffers`, since 2.6.

    Its fourth argument is what balances the load: none to 2.8, indices in 2.9, an object since 2.10. Without it layouts
    of context parallelism must be stated by rules.
    """
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention
    except ImportError:  # below 2.10
        from torch.distributed.tensor.experimental import _attention  # type: ignore[no-redef]

    return _attention, "_context_parallel_buffers"


def list_stage_classes() -> tuple[type[Any], tuple[type[Any], ...]]:
    """The base class of pipeline stages, and the classes that prepare a pipeline.

    `stage._PipelineStageBase` and `stage._PipelineStage`, since 2.6. Without them pipelines cannot be traced.
    """
    from torch.distributed.pipelining.stage import PipelineStage, _PipelineStage, _PipelineStageBase

    return _PipelineStageBase, (PipelineStage, _PipelineStage)


PREPARE_STAGE = "_prepare_forward_infra"
"""The method that a schedule calls before a stage's first chunk, since 2.6. Without it a pass that only learns shapes
would be recorded."""

# Distributed tensors


def read_strided_shard(placement: object) -> tuple[int, int] | None:
    """The dim and the split factor of a strided shard; None for any other placement.

    `placement_types._StridedShard`, since 2.6: what FSDP2 makes of a dim that tensor parallelism cuts too. Without it
    such parameters have a wrong region. Below 2.8 it splits evenly only.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def make_strided_shard(dim: int, split_factor: int) -> Any:
    """A strided shard of a dim; see `read_strided_shard`."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def mask_partial(placement: object, local: torch.Tensor) -> torch.Tensor:
    """The values that count in a sum, where a vocabulary-parallel embedding returns rows of foreign tokens too.

    `_MaskPartial`, since 2.6, in one place or another. Without it those rows would be added up.
    """
    if type(placement).__name__ in ("_MaskPartial", "MaskPartial"):  # the latter in 2.10
        local = local.clone()
        cast("Any", placement).mask_buffer.apply_mask(local)
    return local


def split_locally(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    """This rank's part of a tensor that every rank has.

    `distribute_tensor(src_data_rank=None)`, since 2.7. Without it the parts are taken placement by placement, with
    `Shard._split_tensor`; torch itself would communicate.
    """
    from torch.distributed.tensor import distribute_tensor

    if RELEASE >= (2, 7):
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None).to_local()
    here = mesh.get_coordinate()
    for axis, placement in enumerate(placements if here is not None else ()):
        if not placement.is_replicate():
            parts, _ = placement._split_tensor(tensor, mesh.size(axis), with_padding=False, contiguous=True)
            tensor = parts[cast("list[int]", here)[axis]]
    return tensor if here is not None else tensor[:0]


def wait_for(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a collective that may still be under way: `AsyncCollectiveTensor`, since 2.6.

    Without it values would be read before they arrive.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def find_root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a submesh was sliced from: `DeviceMesh._get_root_mesh`, since 2.10; `_mesh_resources` before.

    Without it `attach` needs `mesh=` where parameters lie on submeshes.
    """
    if RELEASE >= (2, 10):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh

    root: DeviceMesh = device_mesh._mesh_resources.get_root_mesh(mesh)
    return root


def list_fsdp_groups(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    """The groups of parameters that FSDP2 shards together: of a module one for each mesh that they lie on.

    `FSDPModule._get_fsdp_state`, since 2.6, and `FSDPState._fsdp_param_groups`, since 2.12; before, a module has at
    most one group. Without them `attach` needs `grad_factor=` for FSDP2, and takes `dp` for its axis.
    """
    from torch.distributed.fsdp import FSDPModule

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                if RELEASE >= (2, 12):
                    yield from state._fsdp_param_groups
                elif state._fsdp_param_group is not None:
                    yield state._fsdp_param_group


def list_stage_modules(schedule: Any) -> list[nn.Module]:
    """The modules of the stages that a pipeline schedule runs on this rank.

    `_stage` of schedules with one stage, and `_stages` of others, since 2.6. Without them pipelines attach by hand.
    """
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    return [stage.submod for stage in stages]


def read_num_chunks(schedule: Any) -> int:
    """The number of microbatches of a pipeline schedule: `_n_microbatches`, since 2.6. See `list_stage_modules`."""
    number: int = schedule._n_microbatches
    return number


def read_divide_factor(group: Any) -> float | None:
    """Read the number that a group of FSDP2 was told to divide gradients by; None for the number of its ranks.

    `FSDPParamGroup.gradient_divide_factor`, since 2.8. Without it a script that sets a factor needs `grad_factor=`.
    """
    factor = getattr(group, "gradient_divide_factor", None)
    return None if factor is None else float(factor)


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


def make_hash_store() -> Any:
    """A store for a process group of one process: `torch._C._distributed_c10d.HashStore`, since 2.6.

    Without it a test of one rank needs a port.
    """
    from torch._C._distributed_c10d import HashStore

    return HashStore()
