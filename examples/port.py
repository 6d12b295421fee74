"""One model in two implementations: the reference, and with `--port` another one, with other names and dims."""

import argparse
import os
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ttrace  # 1

HIDDEN, INNER, NUM_LAYERS, VOCAB = 32, 48, 3, 50

parser = argparse.ArgumentParser()
parser.add_argument("--port", action="store_true", help="train the port")
parser.add_argument("--bug", action="store_true", help="the port takes the two halves of linear_fc1 for each other")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.gate_proj = nn.Linear(HIDDEN, INNER)
        self.up_proj = nn.Linear(HIDDEN, INNER)
        self.down_proj = nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        normed = self.input_layernorm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


class PortedLayer(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.attention_norm = nn.LayerNorm(HIDDEN)
        self.linear_fc1 = nn.Linear(HIDDEN, 2 * INNER)
        self.linear_fc2 = nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        gate, up = self.linear_fc1(self.attention_norm(x)).chunk(2, -1)[:: -1 if self.bug else 1]
        return x + self.linear_fc2(nn.functional.silu(gate) * up)


class SequenceFirst(nn.Sequential):
    def forward(self, ids):
        return super().forward(ids.t()).transpose(0, 1)


def build(args):
    head, embedding = nn.Linear(HIDDEN, VOCAB), nn.Embedding(VOCAB, HIDDEN)
    if not args.port:
        layers = nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))
        return nn.Sequential(OrderedDict(embed_tokens=embedding, layers=layers, lm_head=head))
    layers = nn.Sequential(*(PortedLayer(args.bug) for _ in range(NUM_LAYERS)))
    return SequenceFirst(OrderedDict(word_embeddings=embedding, layers=layers, output_layer=head))


def main(args):
    torch.manual_seed(0)
    model = build(args)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = ttrace.attach(model, optimizer)  # 2
    with session.step():  # 3
        rows = 4 // int(os.environ.get("WORLD_SIZE", "1"))
        batch = session.batch({name: torch.randint(VOCAB, (rows, 8)) for name in ("ids", "labels")})  # 4
        nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()).backward()
        optimizer.step()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
