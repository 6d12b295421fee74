"""Access to logical parameters, however they are cut, through Megatron's own sharded checkpoints.

Imported after `install`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from zoo.harness.megatron import versions

Tensors = dict[str, torch.Tensor]


def filled(chunks: Sequence[Any]) -> None:
    """Give parameters values that depend on their logical name and place only."""
    with torch.no_grad():
        for leaf in _leaves(chunks):
            values = _filled(leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf)
            leaf.data.copy_(leaf.merge_fn(values) if isinstance(leaf, ShardedTensorFactory) else values)


def whole_parameters(chunks: Sequence[Any]) -> Tensors:
    """Every logical parameter of the model, on every rank."""
    return _merged((shard.key, shard.global_shape, _slices(shard), shard.data.float()) for shard in shards(chunks))


def whole_grads(chunks: Sequence[Any]) -> Tensors:
    """Every logical parameter's `main_grad`, on every rank; what the distributed optimizer scattered is gathered."""
    for chunk in chunks:
        if versions.is_zero(chunk):
            _gather_grads(chunk)
    with _grads_as_parameters(chunks):
        return whole_parameters(chunks)


def shards(chunks: Sequence[Any]) -> Iterator[Any]:
    """This rank's pieces of logical parameters; each has a key, a global shape and an offset."""
    for leaf in _leaves(chunks):
        yield from _flat(leaf.build()) if isinstance(leaf, ShardedTensorFactory) else [leaf]


def _leaves(chunks: Sequence[Any]) -> Iterator[Any]:
    """Parameters that are a piece each, and factories of those that consist of several, as a GLU's two halves."""
    for chunk in chunks:
        model = chunk
        while hasattr(model, "module"):
            model = model.module
        yield from (leaf for leaf in _flat(model.sharded_state_dict()) if leaf.data is not None)


def _flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, ShardedTensor | ShardedTensorFactory):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from _flat(branch)


def _filled(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _filled(branch) for name, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return [_filled(branch) for branch in tree]
    return _values(tree.key, tree.global_shape)[_slices(tree)].view(tree.local_shape)


def _values(key: str, shape: Sequence[int]) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4])
    noise = torch.empty(tuple(shape)).normal_(generator=torch.Generator().manual_seed(seed))
    is_norm = "norm" in key and key.endswith("weight")
    return is_norm + 0.05 * noise


def _slices(shard: Any) -> tuple[slice, ...]:
    lengths = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return tuple(slice(start, start + length) for start, length in zip(shard.global_offset, lengths, strict=True))


def _merged(pieces: Iterable[tuple[str, Sequence[int], tuple[slice, ...], torch.Tensor]]) -> Tensors:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        everyones, [(key, tuple(shape), where, data.detach().clone()) for key, shape, where, data in pieces]
    )
    whole: Tensors = {}
    for key, shape, where, data in (piece for rank in everyones for piece in rank):
        target = whole.setdefault(key, torch.full(shape, torch.nan))[where]
        data = data.view(target.shape)
        same = torch.isnan(target) | torch.isclose(target, data, rtol=1e-3, atol=1e-6)
        assert same.all(), f"{key}: replicas differ by {(target - data).abs().max():.1e}"
        target.copy_(data)
    holes = [key for key, tensor in whole.items() if tensor.isnan().any()]
    assert not holes, f"no rank has all of {holes}"
    return whole


def _gather_grads(chunk: Any) -> None:
    for grads, group in versions.grad_buckets(chunk):
        mine = grads.chunk(group.size())[group.rank()].clone()
        dist.all_gather_into_tensor(grads, mine, group=group)


@contextmanager
def _grads_as_parameters(chunks: Sequence[Any]) -> Iterator[None]:
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    values = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = parameter.main_grad
        yield
    finally:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
