"""Time of a whole check of a reference and a candidate of 2 GB each, compared with reading their files once.

Both traces hold what a step of a transformer leaves: activations and their gradients, parameters before and after, and
their gradients, in bf16 and float32, the candidate's cut over two ranks. Twins were measured before, as they are once
for all candidates of a reference. Both ways use two threads, the files are in the page cache, and rounds alternate in
random order. Memory is the most that the process had in the check beyond what it had before.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import torch

from bench._checksums import without_checksums
from bench._memory import measured
from ttrace.judge.check import judge_candidate
from ttrace.judge.engine import Threads
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.verdict import Exit
from ttrace.layouts.ids import TensorId
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.trace.format import End, Manifest, ModuleInfo, Record
from ttrace.trace.reader import Trace
from ttrace.trace.writer import Writer
from ttrace.values.generate import Normal, generate_values

SHARE, MEMORY = 0.6, 1 << 30
"""The bars."""
NUM_LAYERS, TOKENS, HIDDEN, NUM_ROUNDS, NUM_WORKERS = 24, 4096, 2048, 5, 2
_BUFFER = 1 << 20


def tensors() -> dict[str, tuple[tuple[int, int], torch.dtype, str]]:
    """By id, the shape and dtype of a logical tensor and how the candidate cuts it."""
    found = {}
    for layer in range(NUM_LAYERS):
        for kind, layout in (("output", "t h/tp"), ("grad_output", "t/tp h")):
            found[f"0/0/layers.{layer}/{kind}"] = ((TOKENS, HIDDEN), torch.bfloat16, layout)
        for kind in ("param", "param_grad", "param_after"):
            found[f"0/-/layers.{layer}.weight/{kind}"] = ((HIDDEN, HIDDEN), torch.float32, "o/tp i")
        for part in range(16):
            found[f"0/0/layers.{layer}.norm{part}/output"] = ((64, HIDDEN), torch.bfloat16, "t h")
    return found


def write(folder: Path, role: str, num_ranks: int, error: float) -> Trace:
    """A trace of made-up tensors, each off by a relative error."""
    mesh = Mesh.of(tp=num_ranks) if num_ranks > 1 else Mesh()
    for rank in range(num_ranks):
        modules = {f"layers.{i}": ModuleInfo(type="Layer") for i in range(NUM_LAYERS)}
        parameters = {f"layers.{i}.weight": True for i in range(NUM_LAYERS)}
        manifest = Manifest(
            role=role,
            rank=rank,
            num_ranks=num_ranks,
            mesh=str(mesh),
            seed=0,
            modules=modules,
            parameters=parameters,
        )
        writer = Writer(folder, manifest)
        for text, (shape, dtype, layout) in tensors().items():
            tensor_id, sizes = TensorId.parse(text), {"tp": num_ranks}
            region = Layout.parse(layout).region(shape, sizes, mesh.coord(rank))
            is_parameter, step = tensor_id.kind in ("param", "param_after"), float(tensor_id.kind == "param_after")
            name = tensor_id.name if is_parameter else text  # a step moves a parameter by a little
            data = generate_values(name, region, dtype=torch.float32, distribution=Normal(0.0, 1.0))
            if error:
                data.mul_(1 + error * (1 if rank else -1))
            data = (data + 1e-3 * step).to(dtype)
            writer.write(
                Record(
                    tensor_id,
                    tuple(data.shape),
                    dtype,
                    region,
                    layout=layout,
                    by=Provenance(LayoutSource.RULE, "the bench"),
                ),
                data,
            )
        writer.close(End(num_steps=1))
    return Trace(folder)


def read(traces: tuple[Trace, ...]) -> None:
    """Every byte of all files, once, into small buffers."""
    files = [path for trace in traces for path in sorted(Path(str(trace.folder)).rglob("*.safetensors"))]
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        list(pool.map(_read, files))


def _read(path: Path) -> None:
    buffer = bytearray(_BUFFER)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        reference = write(Path(folder) / "reference", "reference", 1, 0.0)
        twin = write(Path(folder) / "twin-1", "twin", 1, 1e-6)
        candidate = write(Path(folder) / "candidate", "candidate", 2, 1e-7)
        num_bytes = sum(t.num_bytes(i) for t in (reference, candidate) for i in t.shards)
        twins = ToleranceModel.measure(reference, [twin], engine=Threads(NUM_WORKERS))
        ways = ("read", "check", "without checksums")
        shares: dict[str, list[float]] = {way: [] for way in ways}
        peaks, chance = [], random.Random(0)
        for _ in range(NUM_ROUNDS):
            seconds: dict[str, float] = {}
            for way in chance.sample(ways, len(ways)):
                with measured() as peak, without_checksums() if way == "without checksums" else nullcontext():
                    start = time.perf_counter()
                    if way == "read":
                        read((reference, candidate))
                    else:
                        judgement = judge_candidate(twins, Trace(candidate.folder), engine=Threads(NUM_WORKERS))
                        assert judgement.exit is Exit.PASSED, (judgement.problems, judgement.findings)
                    seconds[way] = time.perf_counter() - start
                if way == "check":
                    peaks.append(peak.beyond)
            for way in ways:
                shares[way].append(seconds["read"] / seconds[way])
            print(", ".join(f"{way} {seconds[way]:.2f} s ({shares[way][-1]:.2f})" for way in ways))
    share, unchecked = (statistics.median(shares[way]) for way in ("check", "without checksums"))
    most = max(peaks)
    print(
        f"check: {share:.2f} of the speed of reading {num_bytes / 1e9:.1f} GB once, {unchecked:.2f} without checksums, "
        f"{most / 2**20:.0f} MiB at most (bars {SHARE}, {MEMORY >> 20} MiB)"
    )
    return int(share < SHARE or most > MEMORY)
