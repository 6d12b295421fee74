"""This module measures what `ttrace.watch` costs: the time of a check over that of a hundred steps.

The model has the size of GPT-2 124M and is trained by DDP on two ranks. Checks and steps alternate; medians.
`--flips` trains 500 steps of a small model in which 20 bits flip, and `--soak` trains 20,000 steps.
"""

from __future__ import annotations

import gc
import random
import resource
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ttrace
from ttrace.monitor.disagreement import Disagreement, Trouble
from zoo.harness.candidate import Cell
from zoo.harness.ranks import on_ranks
from zoo.harness.watched import WatchedTraining

SHARE = 0.003
"""The bar: a check every 100 steps, over those steps."""
EVERY, NUM_ROUNDS = 100, 3
WIDTH, NUM_LAYERS, VOCAB, LENGTH = 768, 12, 50257, 64
NUM_FLIPS, NUM_STEPS = 20, 500
SOAK_STEPS, WARM_STEPS = 20_000, 2_000
MOST_BYTES = 4 << 20
"""The bar: what a rank may grow by in a soak."""


def build() -> nn.Module:
    """A transformer of 124 million parameters."""
    layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True)
    blocks = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
    embedding, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, blocks, head)


def measure() -> tuple[float, float, int]:
    """Return the median seconds of a check and of a step, and the number of parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor = ttrace.watch(model, optimizer, every=1_000_000)
    steps, checks = [], []
    for number in range(NUM_ROUNDS + 1):
        begin = time.monotonic()
        words = torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        F.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
        steps.append(time.monotonic() - begin)
        begin = time.monotonic()
        monitor.check()
        checks.append(time.monotonic() - begin)
        optimizer.zero_grad()
    assert not monitor.disagreements
    size = sum(parameter.numel() for parameter in model.parameters())
    return statistics.median(checks[1:]), statistics.median(steps[1:]), size


def flip_bits(out: Path) -> list[Disagreement]:
    """Train with flips, each of which is repaired once it is named; return everything that was named."""
    training = WatchedTraining(Cell("ddp", 2))
    names = [name.removeprefix("module.") for name, _ in training.model.named_parameters()]
    chance = random.Random(0)
    flips = dict.fromkeys(chance.sample(range(1, NUM_STEPS - 10), NUM_FLIPS), "")
    for step in flips:
        flips[step] = chance.choice(names)

    def repair(found: Disagreement) -> None:
        local = training.find_parameter(found.site.partition("/")[0])
        dist.broadcast(local, 0)

    monitor = ttrace.watch(training.model, training.optimizer, every=1, out=out, on_disagreement=repair)
    for step in range(NUM_STEPS):
        if step in flips:
            place, bit = chance.randrange(1 << 30), chance.randrange(30)
            words = training.find_parameter(flips[step]).view(torch.int32).view(-1)
            if training.rank == 1:
                words[place % len(words)] ^= 1 << bit
        training.train(step)
    monitor.close()
    named = {(each.step, each.site) for each in monitor.disagreements if each.trouble is Trouble.REPLICAS_DIFFER}
    wanted = {(step, f"{name}/param") for step, name in flips.items()}
    assert dist.get_rank() or len(wanted) == NUM_FLIPS
    return [each for each in monitor.disagreements if (each.step, each.site) not in wanted] + [
        Disagreement(Trouble.FROZEN, step, site, ()) for step, site in wanted - named
    ]


def soak(out: Path) -> tuple[int, int, int]:
    """Train long; return by how many bytes, file descriptors and Python objects this rank grew."""
    training = WatchedTraining(Cell("ddp", 2))
    monitor = ttrace.watch(training.model, training.optimizer, every=EVERY, out=out)
    before = (0, 0, 0)
    for step in range(SOAK_STEPS):
        if step == WARM_STEPS:
            before = _measure_process()
        training.train(step)
    after = _measure_process()
    monitor.close()
    assert not monitor.disagreements
    assert monitor.num_checks == SOAK_STEPS // EVERY
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def _measure_process() -> tuple[int, int, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize(), sum(1 for _ in Path("/proc/self/fd").iterdir()), len(gc.get_objects())


def main(option: str = "") -> int:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        if option == "--flips":
            wrong = on_ranks(2, flip_bits, Path(folder))[0]
            print("\n".join(map(str, wrong)))
            print(f"{NUM_FLIPS} flips in {NUM_STEPS} steps: {len(wrong)} missed, named twice or wrongly (bar 0)")
            return int(bool(wrong))
        if option == "--soak":
            grown = on_ranks(2, soak, Path(folder), timeout=3600.0)
            most, descriptors, objects = (max(each[i] for each in grown) for i in range(3))
            print(
                f"{SOAK_STEPS} steps, {SOAK_STEPS // EVERY} checks: {most / 2**20:+.1f} MiB, {descriptors:+d} file "
                f"descriptors, {objects:+d} Python objects (bar {MOST_BYTES >> 20} MiB, 0 descriptors)"
            )
            return int(most > MOST_BYTES or descriptors > 0)
        found = on_ranks(2, measure)
    check, step = max(each[0] for each in found), min(each[1] for each in found)
    share = check / (EVERY * step)
    print(
        f"{found[0][2] / 1e6:.0f}M parameters on 2 ranks: a check takes {check * 1e3:.0f} ms, a step {step:.2f} s: "
        f"{share:.3%} of {EVERY} steps (bar {SHARE:.1%})"
    )
    return int(share > SHARE)
