"""Ring attention for torch's context_parallel on CPU, where torch registers none.

context_parallel sends F.scaled_dot_product_attention through the table `custom_ops`, which has entries for the CUDA
kernels only. Two entries are added here, for the forward and the backward of the CPU's flash kernel. Each calls torch's
own ring, as the CUDA entries do; nothing that torch has is replaced.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from ttrace.compat.distributed import find_context_parallel_buffers

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_attention: Any = find_context_parallel_buffers()[0]
_SEQUENCE = 2
"""The dim of q, k and v that is cut: batch, head, token, feature."""


@functools.cache
def allow_ring_attention_on_cpu() -> None:
    handlers: dict[Any, Any] = _attention.custom_ops
    handlers[_FORWARD.default] = _forward  # SDPA of float tensors on CPU ends in this kernel
    handlers[_BACKWARD.default] = _backward  # and its derivative in this one


def _forward(op_call: object, args: Any, kwargs: Any) -> tuple[DTensor, ...]:  # noqa: ARG001
    q, k, v = args[:3]
    settings = dict(zip(("dropout_p", "is_causal"), args[3:], strict=False)) | kwargs
    settings.pop("attn_mask", None)
    out, logsumexp, *_ = _attention._templated_ring_attention(
        q.device_mesh.get_group(), _SEQUENCE, _FORWARD, q.to_local(), k.to_local(), v.to_local(), **settings
    )
    return _cut(q, out), _cut(q, logsumexp)


def _backward(op_call: object, args: Any, kwargs: Any) -> tuple[DTensor, ...]:  # noqa: ARG001
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    tensors = {name: tensor.to_local() for name, tensor in zip(names, args, strict=False)}
    group = args[1].device_mesh.get_group()
    gradients = _attention._templated_ring_attention_backward(
        group,
        _SEQUENCE,
        _BACKWARD.default,
        grad_out_name="grad_out",
        dropout_p=args[6],
        is_causal=args[7],
        scale=kwargs.get("scale"),
        **tensors,
    )
    return tuple(_cut(args[1], gradient) for gradient in gradients[:3])


def _cut(like: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, like.device_mesh, [Shard(_SEQUENCE)], run_check=False)
