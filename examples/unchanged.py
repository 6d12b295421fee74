"""A GPT trained with FSDP2, accumulation and clipping, without a line for TTrace. Run alone, it is the reference.

`--bug` synchronises gradients after the first microbatch, not after the last one.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORLD, VOCAB, WIDTH, LENGTH, NUM_MICROBATCHES = int(os.environ.get("WORLD_SIZE", "1")), 64, 32, 16, 4
DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y, mask = self.norm1(x), nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


if DEVICE != "cpu":
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
torch.manual_seed(0)
model = GPT().to(DEVICE)
text = torch.randint(VOCAB, (256, LENGTH + 1))
dataset, sampler = TensorDataset(text[:, :-1], text[:, 1:]), None
if WORLD > 1:
    dist.init_process_group()
    sampler = DistributedSampler(dataset)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
num_microbatches = NUM_MICROBATCHES // WORLD
for number, batch in enumerate(loader):
    tokens, labels = (part.to(DEVICE) for part in batch)
    if WORLD > 1:
        first, last = number % num_microbatches == 0, (number + 1) % num_microbatches == 0
        model.set_requires_gradient_sync(first if "--bug" in sys.argv else last)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    (loss / num_microbatches).backward()
    if (number + 1) % num_microbatches == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
