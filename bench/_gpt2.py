"""A training script of GPT-2 124M from transformers: in one process, or sharded by FSDP2 under torchrun.

With ATTACH in the environment it attaches TTrace itself; otherwise it does not know of it.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

VOCAB, LENGTH, NUM_MICROBATCHES = 50257, 64, 4


def main() -> None:
    import transformers

    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    untyped: Any = transformers
    model = untyped.GPT2LMHeadModel(untyped.GPT2Config(use_cache=False)).train()
    if world > 1:
        dist.init_process_group("gloo")
        for layer in model.transformer.h:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session: Any = None
    if "ATTACH" in os.environ:
        import ttrace

        session = ttrace.attach(model, optimizer)
    for _ in range(int(os.environ.get("STEPS", "8"))):
        with session.step() if session is not None else nullcontext():
            for _ in range(NUM_MICROBATCHES // world):
                ids, labels = torch.randint(VOCAB, (2, 1, LENGTH))
                batch = {"input_ids": ids, "labels": labels}
                batch = session.batch(batch) if session is not None else batch
                (model(**batch).loss / (NUM_MICROBATCHES // world)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
