"""Script that traces FSDP2 x TP on many ranks, which are threads of one process, and judges the trace.

python -m zoo.harness.threads FOLDER NUM_RANKS TP
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, _install_threaded_pg

from ttrace.capture.plan import Plan
from ttrace.judge.verdict import Verdict
from zoo.harness.candidate import Candidate, Cell, accumulated
from zoo.harness.cells import attached, trace_reference
from zoo.harness.dense import sharded, tensor_parallel
from zoo.harness.runs import NUM_TWINS, judge
from zoo.harness.transformer import Shape, Transformer

SHAPE = Shape(vocab=64, hidden=32, heads=8, kv_heads=8, ffn=32, num_layers=1, length=4)


def run_rank(rank: int, num_ranks: int, tp: int, folder: Path, store: Any) -> None:
    dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
    try:
        mesh = init_device_mesh("cpu", (num_ranks // tp, tp), mesh_dim_names=("dp", "tp"))
        model = sharded(tensor_parallel(Transformer(SHAPE), mesh["tp"]), mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plan = Plan(out=folder / "candidate", role="candidate", reference=folder / "reference", stop=False)
        session = attached(Candidate([model], optimizer, lambda _: None), plan)
        accumulated(session, model, optimizer, SHAPE, 1)
        session.close()
    except BaseException as error:  # the other threads wait for this one
        ProcessLocalGroup.exception_handle(error)
        raise


def main(folder: Path, num_ranks: int, tp: int) -> int:
    for twin in range(NUM_TWINS + 1):
        trace_reference(folder, SHAPE, num_ranks // tp, twin, Cell("fsdp+tp", num_ranks))
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]  # not in the stubs
    store = torch._C._distributed_c10d.HashStore()
    threads = [
        threading.Thread(target=run_rank, args=(rank, num_ranks, tp, folder, store)) for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    judgement = judge(folder, folder / "candidate")
    counts = {verdict.value: judgement.count(verdict) for verdict in Verdict if judgement.count(verdict)}
    print(f"{num_ranks} ranks: exit {int(judgement.exit)}, {counts}, {judgement.problems[:3]}")
    return int(judgement.exit)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
