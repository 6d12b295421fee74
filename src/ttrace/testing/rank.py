"""One rank of a test: `python -m ttrace.testing.rank CALL DEVICE`, alone or under torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ttrace.compat.distributed import make_hash_store
from ttrace.testing.call import load_call


def main(call: Path, device: str) -> None:
    """Make the call inside a process group: of all ranks, or of this one alone."""
    torch.set_num_threads(1)  # ranks share the machine
    backend = "gloo" if device == "cpu" else dist.get_default_backend_for_device(device)
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=make_hash_store(), rank=0, world_size=1)
    try:
        load_call(call).make()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
