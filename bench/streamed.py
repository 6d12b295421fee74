"""One traced iteration of a model that does not fit into memory, and the cost of streaming.

By default: all of a Llama-3-8B-shaped model (bf16, 64 tokens) for its peak memory, and one layer of it, and one that is
as wide as Llama-3.1-405B's, for the time: streamed and traced against bare with its weights in memory, in random order,
each pair giving one ratio of CPU times, those of all threads. Gradients are dropped as they come on both sides.

`--model llama-405b` and `--model deepseek-v3` run all layers of those; `--layers` runs fewer. `--out FILE` writes what
was measured, with the command, as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ttrace
from bench._candidate import DROPPED, judged_on_ranks
from bench._large import MODELS, Large
from bench._memory import measured
from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.verdict import Exit
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace

NUM_TOKENS = 64
GIB = 2**30
PEAK, RATIO, WIDE_RATIO = 4.0, 2.8, 1.5
"""The bars of the default run: GiB; streamed over bare for one layer of 8B's width, and of 405B's."""
KEPT = 8 << 30
"""Bytes of weights that a single layer may keep from forward to backward; the whole model keeps none."""
LARGE_PEAK, LARGE_MINUTES = 16.0, 40.0
"""The bars of the other models."""
NUM_PAIRS, NUM_WIDE_PAIRS = 5, 2
FEW_WORDS = 1024
"""The vocabulary where only layers are timed."""
RECORDED: dict[str, Any] = {"record": "sketch"}
"""What the plan says of recording: in full, traces of these models would fill the disk."""


@dataclass(frozen=True)
class Iteration:
    """One traced step of a streamed model."""

    model: str
    num_layers: int
    num_parameters: int
    num_used: int
    """Parameters that have a gradient: not those of experts that no token went to, nor words that do not occur."""
    num_tokens: int
    seconds: float
    peak_gib: float
    num_records: int
    trace_mib: float
    full_gib: float
    """What the trace would take if nothing were a sketch."""
    loss: float


class Trainee:
    """A model that can run one step on the same tokens, bare or traced."""

    def __init__(self, model: nn.Module, vocab: int, num_tokens: int = NUM_TOKENS) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(vocab, (1, num_tokens), generator=generator)
        self.loss = 0.0

    def step(self) -> None:
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.loss = float(loss.detach())

    def traced(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        session = TracingSession(
            SessionParts(Plan(out=folder, stop=False, **RECORDED), self.model, None, Native([self.model]))
        )
        with session.step():
            self.step()


def bare(large: Large) -> Trainee:
    """With all weights in memory, and gradients dropped as they come: there is room for no more at 405B's width."""
    trainee = Trainee(large.build(), large.vocab)
    for parameter in trainee.model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop)
    return trainee


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def measure_scratch(large: Large, num_tokens: int = NUM_TOKENS) -> float:
    """Measure what torch itself takes for the gradient of the vocabulary's weight, beside it, in GiB.

    On a processor without instructions for bf16 it computes in float32 first, which takes twice the gradient.
    """
    hidden = large.settings["hidden_size"]
    before, after = (torch.ones(num_tokens, size, dtype=torch.bfloat16) for size in (hidden, large.vocab))
    with measured() as peak:
        gradient = after.t() @ before
    return max(0.0, peak.beyond - gradient.nbytes) / GIB


def iteration(name: str, large: Large, folder: Path, *, num_tokens: int = NUM_TOKENS) -> Iteration:
    """Build, stream and trace a model; its memory counts from here, and is that of the whole process."""
    importlib.import_module("transformers")  # before the clock starts
    with measured() as peak:
        start = time.perf_counter()
        trainee = Trainee(ttrace.streamed(large.build), large.vocab, num_tokens)
        trainee.traced(folder)
        seconds = time.perf_counter() - start
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    records = Trace(folder).ranks[0].records
    kept = [record for record in records if not record.is_generated]
    gradients = [record for record in kept if record.id.kind is Kind.PARAM_GRAD]
    return Iteration(
        model=name,
        num_layers=large.num_layers,
        num_parameters=sum(parameter.numel() for parameter in trainee.model.parameters()),
        num_used=sum(math.prod(record.shape) for record in gradients),
        num_tokens=num_tokens,
        seconds=round(seconds, 1),
        peak_gib=round(peak.total / GIB, 2),
        num_records=len(records),
        trace_mib=round(sum(files) / 2**20, 1),
        full_gib=round(sum(math.prod(record.shape) * record.dtype.itemsize for record in kept) / GIB, 2),
        loss=trainee.loss,
    )


def ratio(large: Large, num_pairs: int, folder: Path) -> float:
    """The median of streamed over bare CPU time, for the layers of a model."""
    large = large.cut(vocab=FEW_WORDS)
    without = Trainee(ttrace.streamed(large.build, keep_bytes=KEPT), large.vocab)
    with_weights = bare(large)
    sides: list[Callable[[], None]] = [with_weights.step, lambda: without.traced(folder)]
    chance = random.Random(0)
    found = []
    for number in range(num_pairs + 1):
        order = [0, 1] if chance.random() < 0.5 else [1, 0]
        seconds = {side: _seconds(sides[side]) for side in order}
        if number:  # the first warms up
            found.append(seconds[1] / seconds[0])
            print(f"  bare {seconds[0]:.2f} s, streamed {seconds[1]:.2f} s, ratio {found[-1]:.2f}", flush=True)
    return statistics.median(found)


def candidate(large: Large) -> int:
    """A tensor-parallel candidate as wide as the model, two layers deep: clean, and with an all-reduce dropped."""
    with tempfile.TemporaryDirectory() as name:
        found = judged_on_ranks(large.cut(2, vocab=FEW_WORDS), Path(name))
    wrong = [f"{finding.module}: {finding.cause.sentence}" for finding in found["wrong"].findings]
    is_found = any(DROPPED in line and "missing all-reduce over tp" in line for line in wrong)
    is_right = found["clean"].exit is Exit.PASSED and is_found
    print(f"candidate: clean {found['clean'].exit.name}, with a missing all-reduce {wrong or 'nothing found'}")
    return int(not is_right)


def _seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def parsed(options: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench streamed")
    parser.add_argument("--model", choices=tuple(MODELS), default="llama-8b")
    parser.add_argument("--layers", type=int, help="run fewer layers than the model has")
    parser.add_argument("--candidate", action="store_true", help="only check a candidate with tp=2, cut to two layers")
    parser.add_argument("--no-ratios", action="store_true", help="run only the iteration")
    parser.add_argument("--out", type=Path, help="write the measurements to this file")
    return parser.parse_args(options)


def main(*options: str) -> int:
    args = parsed(options)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if args.candidate:
        return candidate(MODELS[args.model])
    is_default = args.model == "llama-8b"
    measured: dict[str, Any] = {"command": " ".join(["python -m bench streamed", *options])}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "trace"
        found = iteration(args.model, MODELS[args.model].cut(args.layers), folder)
        print(found, flush=True)
        measured |= asdict(found) | _machine()
        ratios = [0.0, 0.0]
        if is_default and not args.no_ratios:
            ratios[0] = ratio(MODELS["llama-8b"].cut(1), NUM_PAIRS, folder)
            ratios[1] = ratio(MODELS["llama-405b"].cut(1), NUM_WIDE_PAIRS, folder)
            measured |= {"ratio": round(ratios[0], 2), "wide_ratio": round(ratios[1], 2)}
    if args.out:
        args.out.write_text(json.dumps(measured, indent=1) + "\n")
    scratch = measure_scratch(MODELS[args.model])
    peak, minutes = (PEAK, float("inf")) if is_default else (LARGE_PEAK, LARGE_MINUTES)
    times = f", {ratios[0]:.2f} and {ratios[1]:.2f} times bare layers of 8B's and 405B's width" if any(ratios) else ""
    print(
        f"streamed: {found.model}, {found.num_layers} layers, {found.num_parameters / 1e9:.1f}B parameters in "
        f"{found.seconds:.0f} s and {found.peak_gib:.2f} GiB, {scratch:.2f} of them torch's own{times} "
        f"(bars {peak:.0f} GiB{f', {minutes:.0f} min' if not is_default else f', {RATIO}, {WIDE_RATIO}'})"
    )
    is_over = found.peak_gib - scratch > peak or found.seconds > 60 * minutes
    return int(is_over or ratios[0] > RATIO or ratios[1] > WIDE_RATIO)


def _machine() -> dict[str, Any]:
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory.split()[1]) / 2**20, 1),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
