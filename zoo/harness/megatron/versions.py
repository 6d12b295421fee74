"""Differences between versions of megatron-core.

Imported after `install`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import distributed, parallel_state, utils
from megatron.core.package_info import __version__
from megatron.core.transformer import transformer_block

VERSION = tuple(int(part) for part in __version__.split(".")[:2])

MAY_LACK = {
    "vp_stage",  # before 0.12: a global says which chunk is being built
    "disable_bucketing",  # speed
    "distributed_timeout_minutes",
}
"""Arguments that change nothing in the versions which do not know them, as does one that is off."""


def call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call with the arguments that this version knows; lacking one that it must know is an error."""
    known = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return function(**arguments)
    needed = {name for name, value in arguments.items() if value is not None and value is not False} - MAY_LACK
    if not needed <= set(known):
        raise TypeError(f"megatron-core {__version__}: {function} takes no {', '.join(sorted(needed - set(known)))}")
    return function(**{name: value for name, value in arguments.items() if name in known})


def loss_outputs(total: torch.Tensor, count: torch.Tensor, everyones: torch.Tensor) -> tuple[Any, ...]:
    """Return what the schedule expects of a loss, given its sum and count here, and on all context-parallel ranks.

    Before 0.12 the mean x cp; from then on sum and count, in 0.12 that of all context-parallel ranks.
    """
    if VERSION < (0, 12):
        return total / everyones[1] * parallel_state.get_context_parallel_world_size(), everyones
    return total, (everyones[1] if VERSION == (0, 12) else count).int(), everyones


def counts_tokens() -> bool:
    """Whether losses may be divided by the tokens of the whole batch; before, that was wrong with `cp`."""
    return VERSION >= (0, 12)


def data_parallel(config: Any, module: Any, *, disable_bucketing: bool, **settings: Any) -> Any:
    """Wrap a chunk; until 0.7 the wrapper took its groups, until 0.6 its settings one by one."""
    wrapper = distributed.DistributedDataParallel
    arguments: dict[str, Any] = {"config": config, "module": module, "disable_bucketing": disable_bucketing}
    if VERSION <= (0, 7):
        arguments["data_parallel_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if (0, 6) <= VERSION <= (0, 7):
        arguments["expert_data_parallel_group"] = parallel_state.get_data_modulo_expert_parallel_group()
    if VERSION <= (0, 6):
        settings["accumulate_allreduce_grads_in_fp32"] = settings.pop("grad_reduce_in_fp32")
        assert not settings.pop("overlap_param_gather")
        settings["bucket_size"] = settings["bucket_size"] or 40_000_000
        return call(wrapper, **arguments, **settings)
    return call(wrapper, **arguments, ddp_config=call(distributed.DistributedDataParallelConfig, **settings))


class NoOptimizer:
    """Where core has none (0.5) or none for float32 that can be made (0.6): the step ends with gradients.

    Of reduced and scattered ones it says which part is this rank's, in the words of Megatron's own optimizer.
    """

    def __init__(self, chunks: list[Any]) -> None:
        self._owned = {parameter: run for chunk in chunks if is_zero(chunk) for parameter, run in _owned(chunk)}
        if self._owned:
            self.model_param_gbuf_map = self._owned

    def _get_model_param_range_map(self, parameter: Any) -> dict[str, Any]:
        return {"param": self._owned[parameter]}

    def zero_grad(self) -> None: ...

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def step(self) -> tuple[bool, None, None]:
        return True, None, None


def optimizer(chunks: list[Any], **settings: Any) -> Any:
    is_mixed = settings["bf16"] or settings["fp16"] or settings["use_distributed_optimizer"]
    if VERSION < (0, 6) or (VERSION == (0, 6) and not is_mixed):
        return NoOptimizer(chunks)
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(call(OptimizerConfig, **settings), chunks)


def zero_grads(chunk: Any) -> None:
    call(chunk.zero_grad_buffer, **({"zero_buffer": True} if VERSION < (0, 6) else {}))


def grad_buckets(chunk: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """The flat gradients that are reduced together, each with its group."""
    old = VERSION < (0, 6)
    for buffer in chunk.grad_buffers.values() if old else chunk.buffers + chunk.expert_parallel_buffers:
        for bucket in buffer.buckets:
            yield bucket.data if old else bucket.grad_data, buffer.data_parallel_group


def is_zero(chunk: Any) -> bool:
    """Whether the distributed optimizer has the gradients scattered."""
    holder = chunk if VERSION <= (0, 6) else chunk.ddp_config
    return bool(holder.use_distributed_optimizer)


@dataclass(frozen=True)
class Run:
    """A run of a parameter's values."""

    start: int
    end: int


def _owned(chunk: Any) -> Iterator[tuple[Any, Run]]:
    """By parameter, the run that reducing and scattering leaves on this rank (0.5)."""
    for buffer in chunk.grad_buffers.values():
        for parameter, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            share = bucket.data.numel() // bucket.data_parallel_world_size
            first = bucket.offset + share * bucket.data_parallel_rank - start
            yield parameter, Run(*(min(max(at, 0), end - start) for at in (first, first + share)))


def reset_parallel_state(pristine: dict[str, Any]) -> None:
    """Older versions leave ranks of the last layout behind."""
    parallel_state.destroy_model_parallel()
    vars(parallel_state).update(pristine)


@dataclass(frozen=True)
class Place:
    """Where a chunk lies in the pipeline."""

    vp_stage: int | None
    is_first: bool
    is_last: bool


def chunk_place(number: int, num_chunks: int) -> Place:
    """Say which chunk of this stage comes next, and where it lies."""
    if num_chunks == 1:
        return Place(None, parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())
    parallel_state.set_virtual_pipeline_model_parallel_rank(number)
    arguments = {"ignore_virtual": False, "vp_stage": number}
    is_first = call(parallel_state.is_pipeline_first_stage, **arguments)
    return Place(number, is_first, call(parallel_state.is_pipeline_last_stage, **arguments))


def batch_on_this_cp_rank(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's two pieces of every sequence; before 0.12 the function was Megatron-LM's, not core's."""
    if hasattr(utils, "get_batch_on_this_cp_rank"):
        # Since 0.18 no group means all ranks, not those of context parallelism.
        group = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
        return dict(utils.get_batch_on_this_cp_rank(batch, **(group if VERSION >= (0, 18) else {})))
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    mine = {}
    for name, tensor in batch.items():
        dim = 2 if name == "attention_mask" else 1
        pieces = tensor.chunk(2 * size, dim)
        mine[name] = torch.cat([pieces[rank], pieces[2 * size - rank - 1]], dim) if size > 1 else tensor
    return mine


def block_spec(spec: Any, config: Any, vp_stage: int | None, norm: type) -> Any:
    """Layers that are all alike, and the norm behind the last."""
    num_layers = call(transformer_block.get_num_layers_to_build, config=config, vp_stage=vp_stage)
    return transformer_block.TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=norm)
