"""The part of a batch that a rank of context parallelism gets if no group is passed, since megatron-core 0.18.

    torchrun --standalone --nproc-per-node 4 megatron_cp_batch.py

Needs only megatron-core. Two ranks of tensor parallelism times two of context parallelism, and eight tokens: each rank
must get four of them, and both ranks of tensor parallelism the same ones.
"""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from megatron.core import __version__, parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank


def find_tokens(**group: object) -> list[int]:
    batch = {"tokens": torch.arange(8).unsqueeze(0), "cu_seqlens": None}
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:
        group["is_hybrid_cp"] = False
    return [int(token) for token in get_batch_on_this_cp_rank(batch, **group)["tokens"][0]]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
    mine = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        find_tokens(),
        find_tokens(cp_group=parallel_state.get_context_parallel_group()),
    )
    everyones: list[tuple[int, int, list[int], list[int]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    if dist.get_rank() == 0:
        print(f"megatron-core {__version__}")
        for tp, cp, without, with_group in everyones:
            print(f"tp {tp}, cp {cp}: {without} without a group, {with_group} with it")
    dist.destroy_process_group()
