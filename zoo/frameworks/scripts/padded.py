"""An encoder of padded sentences and of a padded vocabulary, with data parallelism.

A batch has a mask of floats, 1 for tokens and 0 for padding. The vocabulary has 97 words in an embedding of 128 rows.
With --sorted, long sentences come first, so the first batches have no padding, and the labels of padding are ignored.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
BUG = sys.argv[sys.argv.index("--bug") + 1] if "--bug" in sys.argv else ""
HIDDEN, WORDS, ROWS, LENGTH, BATCH = 32, 97, 128, 16, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scale = HIDDEN**-1.0 if BUG == "scale" else HIDDEN**-0.5
        scores = q @ k.mT * scale
        if BUG != "mask":
            scores = scores + (1 - mask[:, None]) * -1e4
        return x + self.out(scores.softmax(-1) @ v)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention, self.head = nn.Embedding(ROWS, HIDDEN), Attention(), nn.Linear(HIDDEN, ROWS)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(self.embedding(x), mask))


torch.manual_seed(0)
model: nn.Module = Encoder()
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(WORDS, (128, LENGTH + 1))
lengths, labels = torch.randint(6, LENGTH + 1, (128,)), tokens[:, 1:]
if "--sorted" in sys.argv:
    lengths = lengths.sort(descending=True).values
    lengths[: 4 * BATCH] = LENGTH
mask = (torch.arange(LENGTH) < lengths[:, None]).float()
if "--sorted" in sys.argv:
    labels = torch.where(mask.bool(), labels, -100)
data = TensorDataset(tokens[:, :-1], labels, mask)
sampler = DistributedSampler(data, shuffle=False) if WORLD > 1 else None
for x, y, m in DataLoader(data, BATCH // WORLD, sampler=sampler):
    optimizer.zero_grad()
    logits = model(x, m).flatten(0, 1)
    count = (y >= 0).sum().float()
    if WORLD > 1 and BUG != "mean":
        dist.all_reduce(count)
        count /= WORLD
    scores = logits if BUG == "vocabulary" else logits[:, :WORDS]
    (F.cross_entropy(scores, y.flatten(), reduction="sum") / count).backward()
    optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
