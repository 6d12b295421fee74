"""Zero-bubble pipelines inside DDP: the gradients of replicated stages are never averaged.

    torchrun --standalone --nproc-per-node 4 zero_bubble_ddp.py

Needs only torch. Four stages on two pipeline ranks, each wrapped by DDP over two data-parallel ranks with their own
data. After a step the replicas of a stage must have the same gradient; the distance of theirs from the mean is printed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

NUM_MICROBATCHES, BATCH, WIDTH = 4, 2, 8


def differences(schedule: type) -> list[float]:
    """By stage of this rank, how far its gradients are from those of the other replica, relatively."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    dp, pp = mesh["dp"].get_group(), mesh["pp"].get_group()
    stages = []
    for chunk in range(2):
        number = 2 * chunk + pp.rank()
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        wrapped = DistributedDataParallel(model, process_group=dp)
        stages.append(PipelineStage(wrapped, number, 4, torch.device("cpu"), group=pp))
    torch.manual_seed(100 + dp.rank())
    batch, target = torch.randn(2, NUM_MICROBATCHES * BATCH, WIDTH)
    running = schedule(stages, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    inputs = (batch,) if pp.rank() == 0 else ()
    last = {"target": target, "losses": []} if pp.rank() == 1 else {}
    running.step(*inputs, **last)
    return [_difference(stage.submod, dp) for stage in stages]


def _difference(module: nn.Module, group: dist.ProcessGroup) -> float:
    mine = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    mean = mine.clone()
    dist.all_reduce(mean, group=group)
    mean /= group.size()
    return float((mine - mean).norm() / mean.norm())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        everyones: list[list[float]] = [[] for _ in range(4)]
        dist.all_gather_object(everyones, differences(schedule))
        if dist.get_rank() == 0:
            by_stage = [everyones[number % 2][number // 2] for number in range(4)]
            print(f"{schedule.__name__}: {', '.join(f'stage {i} {d:.1e}' for i, d in enumerate(by_stage))}")
    dist.destroy_process_group()
