"""torchtitan sums an accumulated loss over ranks that is summed already; torchtitan alone, on torch 2.13.

torchrun --standalone --nproc-per-node 2 torchtitan_reported_loss.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torchtitan.distributed.utils import dist_sum

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
loss = DTensor.from_local(torch.ones(()), mesh, [Partial()])  # of each microbatch, as spmd_backend full_dtensor has it
accumulated = loss.clone()  # as Trainer.train_step does
accumulated.add_(loss)
found = dist_sum(accumulated, mesh)
if dist.get_rank() == 0:
    print(
        f"torch {torch.__version__}: {accumulated.placements}, reported {found}, right is {2.0 * dist.get_world_size()}"
    )
dist.destroy_process_group()
