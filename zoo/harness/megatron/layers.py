"""Layers given through the layer spec: stand-ins for those that only TransformerEngine has, and one custom layer.

Imported after `install`.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule


class Attention(DotProductAttention):  # type: ignore[misc]  # megatron is known only on the ranks
    """Megatron's own attention, over keys and values gathered from all context-parallel ranks.

    The original knows neither context parallelism nor values of another width than keys, which latent attention has.
    """

    def __init__(self, config: Any, *args: Any, v_channels: int | None = None, **kwargs: Any) -> None:
        config = copy.copy(config)
        config.context_parallel_size = 1
        known = inspect.signature(DotProductAttention.__init__).parameters
        super().__init__(config, *args, **{name: value for name, value in kwargs.items() if name in known})
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        num_ranks = parallel_state.get_context_parallel_world_size()
        if num_ranks > 1:
            key, value = natural(gathered(key), num_ranks), natural(gathered(value), num_ranks)
        return super().forward(query, key, value, attention_mask, *args, **kwargs)


def gathered(x: torch.Tensor) -> torch.Tensor:
    """The sequences (dim 0) of all context-parallel ranks behind each other; their gradients are summed."""
    whole: torch.Tensor = _Gathered.apply(x)  # type: ignore[no-untyped-call]  # torch gives it no types
    return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        group = parallel_state.get_context_parallel_group()
        whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        group = parallel_state.get_context_parallel_group()
        part = grad.new_empty(grad.shape[0] // group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(part, grad.contiguous(), group=group)
        return part


def natural(zigzag: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Undo the zigzag, in which rank r has the r-th piece from the front and the r-th from the end."""
    pieces = zigzag.chunk(2 * num_ranks)
    return torch.cat([*pieces[::2], *reversed(pieces[1::2])])


class SequenceNorm:
    """A torch norm whose parameters say that they see a part of the sequence, as TransformerEngine's do."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:  # noqa: ARG004
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class Mixer(MegatronModule):  # type: ignore[misc]  # megatron is known only on the ranks
    """A layer as users write them: each rank multiplies its channels, and Megatron sums over ranks."""

    def __init__(self, config: Any, *, transposed: bool, **kwargs: Any) -> None:  # noqa: ARG002
        super().__init__(config)
        self._num_ranks = parallel_state.get_tensor_model_parallel_world_size()
        self._transposed = transposed
        self.weight = torch.nn.Parameter(torch.zeros(config.hidden_size, config.hidden_size // self._num_ranks))
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 1, 1)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:  # noqa: ARG002
        rank = parallel_state.get_tensor_model_parallel_rank()
        mine = tensor_parallel.copy_to_tensor_model_parallel_region(x).chunk(self._num_ranks, -1)[rank]
        part = (mine.transpose(0, 1) @ self.weight.T).transpose(0, 1)
        part = part if self._transposed else part.contiguous()
        return tensor_parallel.reduce_from_tensor_model_parallel_region(part), None


MIXER_RULES = {"decoder.layers.*.mlp.weight": "out in/tp"}
"""All that must be said of it."""
