"""Trains a small network with DeepSpeed in less usual ways; without `--stage`, the same with plain PyTorch.

`--by-hand` accumulates in the script, which the engine is not told; with `--stated` it is told which backward is last.
`--clip` leaves clipping to DeepSpeed, which since 0.19.3 clips gradients to a norm of 1 if it is told nothing.
"""

import argparse
import sys

import torch
from tiny import BATCH, NUM_MICROBATCHES, WORLD
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int)
parser.add_argument("--by-hand", action="store_true")
parser.add_argument("--stated", action="store_true")
parser.add_argument("--clip", action="store_true")
options = parser.parse_args()

NUM_STEPS, WIDTH = 5, 32
MINE = NUM_MICROBATCHES // WORLD


class Points(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        x, y = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))
        return {"x": x, "y": y}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 3 * WIDTH)
        self.middle = nn.Linear(3 * WIDTH, 3 * WIDTH)
        self.last = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return (x - y).square().mean(), (x - y).abs().mean()


torch.manual_seed(0)
rows, model = Points(), Network()
if options.stage is None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    loader = iter(DataLoader(rows, BATCH))
    for _ in range(NUM_STEPS):
        for _ in range(MINE):
            square, absolute = model(**next(loader))
            ((square + absolute) / MINE).backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.exit()

from deepspeed_on_cpu import deepspeed  # noqa: E402

deepspeed.init_distributed(dist_backend="gloo")
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 1 if options.by_hand else MINE,
    **({} if options.clip else {"gradient_clipping": 0}),
    "zero_optimization": {"stage": options.stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
loader = iter(DataLoader(rows, BATCH, sampler=DistributedSampler(rows)))
for number in range(NUM_STEPS * MINE):
    square, absolute = engine(**next(loader))
    is_last = number % MINE == MINE - 1
    if options.stated:
        engine.set_gradient_accumulation_boundary(is_boundary=is_last)
    engine.backward((square + absolute) / (MINE if options.by_hand else 1))
    if is_last or not options.by_hand:
        engine.step()
