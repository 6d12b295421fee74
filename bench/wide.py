"""The trace of a wide job, 16,384 simulated ranks with 10^6 records, opened and planned for a check.

Each rank has its own manifest and records, as the ranks of a job write them without knowing of each other;
no tensor has bytes. Planned is what a check does before it reads any: manifests and records are merged, every id gets
its shards, its pieces and their coverage, and ids are put into lots. Each size runs in its own process.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from ttrace.judge.engine import make_lots
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.layouts.ids import TensorId
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.trace.format import END, MANIFEST, RECORDS, End, Manifest, ModuleInfo, Record, rank_folder, seal_model
from ttrace.trace.lines import encode
from ttrace.trace.reader import Trace
from ttrace.trace.seal import seal_line, sum_of

SECONDS, MEMORY = 120.0, 4 << 30
"""The bars, at the largest size."""
SIZES = (1024, 4096, 16384)
NUM_RECORDS, DEPTH, STAGES, TP = 62, 16, 8, 8
"""Of each rank, with its layers; then the sizes of two axes, and all other ranks lie along dp."""
_LAYER = re.compile(r"(?<=layers\.)L(\d+)")
HIDDEN, TOKENS = 8192, 1 << 20
_KINDS = {
    "output": ("t/dp h", (TOKENS, HIDDEN)),
    "grad_output": ("t/dp h", (TOKENS, HIDDEN)),
    "param": ("i/tp o/dp", (HIDDEN, 4 * HIDDEN)),
    "param_grad": ("i/tp o/dp", (HIDDEN, 4 * HIDDEN)),
}


def write(folder: Path, num_ranks: int) -> None:
    tp = min(TP, num_ranks)
    stages = min(STAGES, num_ranks // tp)
    mesh = Mesh.of(pp=stages, dp=num_ranks // stages // tp, tp=tp)
    end = End(num_steps=1, num_records=NUM_RECORDS)
    manifests = [_manifest(mesh, stage) for stage in range(stages)]
    for first in range(num_ranks // stages):  # the stages' ranks in this place differ in the names of their layers only
        lines = _lines(mesh, first)
        for stage in range(stages):
            rank = stage * (num_ranks // stages) + first
            path = folder / rank_folder(rank)
            path.mkdir(parents=True)
            (path / MANIFEST).write_text(seal_model(manifests[stage].model_copy(update={"rank": rank})))
            renamed = _LAYER.sub(lambda m, at=stage: str(at * DEPTH + int(m[1])), lines)  # type: ignore[misc]
            text = "".join(f"{seal_line(line)}\n" for line in renamed.splitlines())
            (path / RECORDS).write_text(text)
            (path / END).write_text(seal_model(end.model_copy(update={"records_sum": sum_of(text.encode())})))


def _lines(mesh: Mesh, rank: int) -> str:
    lines, at = [], 0
    for number in range(NUM_RECORDS):
        kind = list(_KINDS)[number % len(_KINDS)]
        layout, shape = _KINDS[kind]
        region = Layout.parse(layout).region(shape, mesh.sizes, mesh.coord(rank))
        name = f"layers.L{number // len(_KINDS)}"
        text = f"0/-/{name}.weight/{kind}" if kind.startswith("param") else f"0/0/{name}/{kind}"
        record = Record(
            TensorId.parse(text),
            region.local_shape,
            torch.bfloat16,
            region,
            layout=layout,
            by=Provenance(LayoutSource.RULE, "rule 7"),
        )
        record = replace(record, order=number, begin=at, end=at + record.num_bytes)
        lines.append(f"{encode(record)}\n")
        at = record.end
    return "".join(lines)


def _manifest(mesh: Mesh, stage: int) -> Manifest:
    names = [f"layers.{stage * DEPTH + layer}.part.{part}" for layer in range(DEPTH) for part in range(12)]
    return Manifest(
        role="candidate",
        rank=0,
        num_ranks=mesh.num_ranks,
        mesh=str(mesh),
        seed=0,
        modules={name: ModuleInfo(type="megatron.Layer", source="layers.py:12") for name in names},
        parameters={f"{name}.weight": True for name in names},
    )


def plan(folder: Path) -> dict[str, float]:
    """What planning took, and what it planned."""
    before, start = _peak(), time.perf_counter()
    trace = Trace(folder)
    opened = time.perf_counter()
    num_shards = sum(map(len, trace.shards.values()))
    merged = time.perf_counter()
    for tensor_id in trace.shards:
        logical = LogicalTensor.of(trace, tensor_id)
        assert logical is not None
        assert logical.coverage().is_tiling, tensor_id
        assert trace.owners(tensor_id.name.removesuffix(".weight") + ".part.0")
    num_lots = sum(1 for _ in make_lots(trace.shards, trace.num_bytes))
    end = time.perf_counter()
    return {
        "ranks": len(trace.ranks),
        "records": num_shards,
        "ids": len(trace.shards),
        "lots": num_lots,
        "opened": opened - start,
        "merged": merged - opened,
        "planned": end - merged,
        "seconds": end - start,
        "bytes": _peak() - before,
    }


def main() -> int:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in SIZES:
            path = Path(folder) / str(num_ranks)
            write(path, num_ranks)
            code = "import json, pathlib, sys, bench.wide as w; print(json.dumps(w.plan(pathlib.Path(sys.argv[1]))))"
            command = [sys.executable, "-c", code, str(path)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found = json.loads(said)
            print(
                f"{found['ranks']:>6} ranks, {found['records']:>7} records of {found['ids']} ids, "
                f"{found['lots']} lots: opened {found['opened']:.1f} s, merged {found['merged']:.1f} s, "
                f"planned {found['planned']:.1f} s, {found['bytes'] / 2**20:.0f} MiB",
                flush=True,
            )
    seconds, num_bytes = found["seconds"], found["bytes"]
    print(
        f"wide: {SIZES[-1]} ranks and {found['records']} records planned in {seconds:.1f} s and "
        f"{num_bytes / 2**30:.2f} GiB (bars {SECONDS:.0f} s, {MEMORY >> 30} GiB)"
    )
    return int(seconds > SECONDS or num_bytes > MEMORY)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
