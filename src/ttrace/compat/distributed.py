"""Private APIs of torch.distributed, all in one place: DTensor, FSDP2, pipelining and collectives.

As in `compat/torch.py`, each entry names the first version of torch that has it, and what happens without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ttrace.compat.torch import RELEASE, read_node_number

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Context parallelism and pipelining


def find_context_parallel_buffers() -> tuple[ModuleType, str]:
    """Return what `context_parallel` calls to split sequences: `_attention._context_parallel_buffers`, since 2.6.

    Its fourth argument is the load balancer: none up to 2.8, indices in 2.9, an object since 2.10. Without it layouts
    of context parallelism must be stated by rules.
    """
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention
    except ImportError:  # below 2.10
        from torch.distributed.tensor.experimental import _attention  # type: ignore[no-redef]

    return _attention, "_context_parallel_buffers"


def list_stage_classes() -> tuple[type[Any], tuple[type[Any], ...]]:
    """Return the base class of pipeline stages, and the classes that prepare a pipeline.

    `stage._PipelineStageBase` and `stage._PipelineStage`, since 2.6. Without them pipelines cannot be traced.
    """
    from torch.distributed.pipelining.stage import PipelineStage, _PipelineStage, _PipelineStageBase

    return _PipelineStageBase, (PipelineStage, _PipelineStage)


PREPARE_STAGE = "_prepare_forward_infra"
"""The method that a schedule calls before a stage's first chunk, since 2.6. Without it a pass that only infers shapes
would be recorded."""

# Distributed tensors


def read_strided_shard(placement: object) -> tuple[int, int] | None:
    """Return the dim and the split factor of a strided shard; None for any other placement.

    `placement_types._StridedShard`, since 2.6: what FSDP2 makes of a dim that tensor parallelism cuts too. Without it
    such parameters have a wrong region. Below 2.8 it splits evenly only.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def make_strided_shard(dim: int, split_factor: int) -> Any:
    """Return a strided shard of a dim; see `read_strided_shard`."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def mask_partial(placement: object, local: torch.Tensor) -> torch.Tensor:
    """Return the values that count in a sum; a vocabulary-parallel embedding also has rows for tokens of other ranks.

    `_MaskPartial`, since 2.6, in one place or another. Without it those rows would be added up.
    """
    if type(placement).__name__ in ("_MaskPartial", "MaskPartial"):  # the latter in 2.10
        local = local.clone()
        cast("Any", placement).mask_buffer.apply_mask(local)
    return local


def split_locally(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank has.

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
    """Return the values of a collective that may still be running: `AsyncCollectiveTensor`, since 2.6.

    Without it values would be read before they arrive.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def find_root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that contains a submesh: `DeviceMesh._get_root_mesh`, since 2.10; `_mesh_resources` before.

    Without it `attach` needs `mesh=` where parameters lie on submeshes.
    """
    if RELEASE >= (2, 10):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh

    root: DeviceMesh = device_mesh._mesh_resources.get_root_mesh(mesh)
    return root


def list_fsdp_groups(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    """Return the groups of parameters that FSDP2 shards together: for each module, one group for each of its meshes.

    `FSDPModule._get_fsdp_state`, since 2.6, and `FSDPState._fsdp_param_groups`, since 2.12; before, a module has at
    most one group. Without them `attach` needs `grad_factor=` for FSDP2, and assumes that its axis is `dp`.
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
    """Return the modules of the stages that a pipeline schedule runs on this rank.

    `_stage` of schedules with one stage, and `_stages` of others, since 2.6. Without them, pipelines must call
    `ttrace.attach`.
    """
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    return [stage.submod for stage in stages]


def read_num_chunks(schedule: Any) -> int:
    """Return a pipeline schedule's number of microbatches: `_n_microbatches`, since 2.6. See `list_stage_modules`."""
    number: int = schedule._n_microbatches
    return number


def read_divide_factor(group: Any) -> float | None:
    """Read the number that was set for a group of FSDP2 to divide gradients by; None for the number of its ranks.

    `FSDPParamGroup.gradient_divide_factor`, since 2.8. Without it a script that sets a factor needs `grad_factor=`.
    """
    factor = getattr(group, "gradient_divide_factor", None)
    return None if factor is None else float(factor)


# Collectives

_OBSERVED = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
"""The operators of c10d, since 2.6, with their names in torch.distributed. Others are not in the ledger."""


def observe_collectives(observe: Callable[[str, Mapping[str, Any], Callable[[], Any]], Any]) -> Callable[[], None]:
    """Call `observe` for every collective and message of this process; return a function that ends this.

    `observe` gets the collective's name, its operator's arguments by name, and a function that runs it.
    Kernels for the operators of `c10d`, which all collectives go through, those of C++ as well, since 2.6. They are
    registered for the dispatch key `BackendSelect`, which is never switched off, unlike those of autograd, and stands
    in front of each backend; `Library._destroy` removes them. Without them there is no ledger of collectives.
    """
    library = torch.library.Library("c10d", "IMPL")
    for operator, name in _OBSERVED.items():
        packet = getattr(torch.ops.c10d, operator, None)
        if packet is not None:
            library.impl(operator, _make_kernel(name, packet.default, observe), "BackendSelect", with_keyset=True)
    end: Callable[[], None] = library._destroy
    return end


def count_collectives() -> int | None:
    """Count what all groups of this process have issued: `ProcessGroup._get_sequence_number_for_group`, since 2.6.

    None if some backend does not count. Without it, own initial values of parameters are not compared.
    """
    dist: Any = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    try:
        groups = dist.distributed_c10d._world.pg_map
        return sum(int(group._get_sequence_number_for_group()) for group in groups)
    except (AttributeError, RuntimeError):
        return None


def _make_kernel(name: str, operator: Any, observe: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel that observes, and runs the backend's kernel. See `observe_collectives`."""
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return operator.redispatch(keys.remove(torch._C.DispatchKey.BackendSelect), *args, **kwargs)

        return observe(name, {**dict(zip(names, args, strict=False)), **kwargs}, run)

    return kernel


def read_group(boxed: Any) -> Any:
    """Read the process group that an operator of `c10d` got: `ProcessGroup.unbox`, since 2.6.

    Without it the ledger does not contain the ranks of a collective.
    """
    import torch.distributed as dist

    return dist.ProcessGroup.unbox(boxed)


def find_work(result: Any) -> Any:
    """Return the work that an operator of `c10d` returned, as the object that its caller gets; None if it has none.

    `Work.unbox`, since 2.6: pybind11 gives one object of Python to one of C++. Without it, buffers that are
    written too early are not noticed.
    """
    import torch.distributed as dist

    boxed = result[-1] if isinstance(result, tuple) else result
    return dist.Work.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else None


_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
"""The names of `ReduceOp`, since 2.6; others are not in the ledger."""


def read_reduction(boxed: Any, frames: Sequence[FrameType]) -> str:
    """Read the reduction of an operator of `c10d`, such as "sum"; empty if it is unknown.

    `ReduceOp.unbox`, since 2.15. Before, it cannot be read from the operator's argument, so it is read from the local
    variables of the calling functions of torch: `op`, `reduceOp` or `reduce_op`. Without either, the ledger does not
    contain it.
    """
    import torch.distributed as dist

    if hasattr(dist.ReduceOp, "unbox"):
        return _name_reduction(dist.ReduceOp.unbox(boxed))
    for frame in frames:
        for name in ("op", "reduceOp", "reduce_op"):
            reduction = _name_reduction(frame.f_locals.get(name))
            if reduction:
                return reduction
    return ""


def _name_reduction(value: Any) -> str:
    """Return the name of a reduction; empty for another value. See `read_reduction`."""
    import torch.distributed as dist

    if value is None:
        return ""
    if isinstance(value, str):
        return value.lower() if value.upper() in _REDUCTIONS else ""
    if isinstance(value, dist.ReduceOp.RedOpType):
        return value.name.lower()
    if not isinstance(value, dist.ReduceOp):
        return ""
    return next((name.lower() for name in _REDUCTIONS if value == getattr(dist.ReduceOp, name, None)), "")


FUNCTIONS = {"_ToTorchTensor": "to_local", "_FromTorchTensor": "from_local", "Redistribute": "redistribute"}
"""The methods of DTensor that its autograd functions of these names belong to, since 2.6. Without them the first wrong
operation has an internal name."""


def read_current_node() -> int | None:
    """Return the sequence number of the autograd node that this thread runs; None outside of a backward pass.

    `torch._C._current_autograd_node`, since 2.6. Without it the ledger does not contain the module in whose
    backward a collective ran.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else read_node_number(node)


def make_hash_store() -> Any:
    """Return a store for a process group of one process: `torch._C._distributed_c10d.HashStore`, since 2.6.

    Without it a test of one rank needs a port.
    """
    from torch._C._distributed_c10d import HashStore

    return HashStore()
