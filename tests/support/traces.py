"""Traces that are written without a process group: all ranks are a loop over coordinates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ttrace.judge.check import check
from ttrace.judge.margin import MARGIN
from ttrace.judge.verdict import Comparison, Judgement
from ttrace.layouts.ids import TensorId
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import MICROBATCH_AXIS, Mesh
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.layouts.region import Region, Shape
from ttrace.trace.collectives import Collective, encode_collective
from ttrace.trace.format import End, InitialValues, Manifest, ModuleInfo, Record, SketchInfo
from ttrace.trace.reader import Trace
from ttrace.trace.writer import Writer
from ttrace.values.generate import Distribution
from ttrace.values.sketch import compute_sketch

Change = Callable[[torch.Tensor], torch.Tensor]
RULE = Provenance(LayoutSource.RULE, "test rule")
"""The provenance of the layouts in built traces."""


def draw_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draw a tensor of random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nudge(tensor: torch.Tensor, size: float, seed: int = 99) -> torch.Tensor:
    """Return the tensor with every element off by about `size`, relative to it, as rounding does, or more."""
    if not tensor.is_floating_point() or size == 0.0:
        return tensor
    direction = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return (tensor.double() * (1 + size * direction)).to(tensor.dtype)


class TraceBuilder:
    """Builder of a trace: it collects the records of all ranks, and `close` writes them.

    The modules of a rank are those of its records, and those that `owns` names.
    """

    def __init__(
        self,
        folder: Path,
        mesh: str = "",
        role: str = "candidate",
        *,
        owns: Mapping[int, Sequence[str]] | None = None,
        grad_factor: float = 1.0,
        splits: Mapping[str, str] | None = None,
        batch_axes: tuple[str, ...] = (),
        forward_buffers: Sequence[str] = (),
        num_buckets: int = 0,
        **manifest: Any,
    ) -> None:
        self.folder = folder
        self.num_buckets = num_buckets
        self.grad_factor = grad_factor
        self.splits = dict.fromkeys(batch_axes, "block") | dict(splits or {})
        self.batch_axes = batch_axes
        self.forward_buffers = tuple(forward_buffers)
        self.samples: dict[int, dict[str, tuple[str, ...]]] = defaultdict(dict)
        self.replaced: dict[int, dict[str, tuple[str, ...]]] = defaultdict(dict)
        self.initial: dict[int, dict[str, InitialValues]] = defaultdict(dict)
        self.stale: dict[int, tuple[str, ...]] = {}
        self.collectives: dict[int, list[Collective]] = defaultdict(list)
        self.num_samples: dict[int, int] = defaultdict(int)
        self.mesh = Mesh.parse(mesh)
        self.sizes = {**self.mesh.sizes, MICROBATCH_AXIS: manifest.get("num_microbatches", 1)}
        self._manifest = {"role": role, "mesh": mesh, "num_ranks": self.mesh.num_ranks, "seed": 0, **manifest}
        self.num_steps = 1
        self.end: dict[str, Any] = {}
        """More facts of the end of every rank."""
        self.modules: dict[str, ModuleInfo] = {}
        """The modules that are not of the usual class."""
        self._owns = {rank: set((owns or {}).get(rank, ())) for rank in range(self.mesh.num_ranks)}
        self._records: dict[int, list[tuple[Record, torch.Tensor]]] = {rank: [] for rank in range(self.mesh.num_ranks)}

    def record(
        self,
        rank: int,
        name: str,
        tensor: torch.Tensor,
        layout: str | None = None,
        *,
        shape: Shape | None = None,
        region: Region | None = None,
        microbatch: int = 0,
        values: Distribution | None = None,
        by: Provenance | None = None,
    ) -> None:
        """Record one rank's tensor, placed by `layout` and the logical `shape`, or by `region`, or not at all."""
        read = Layout.parse(layout) if layout is not None else Layout(())
        if layout is not None and region is None:
            where = {**self.mesh.coord(rank), MICROBATCH_AXIS: microbatch}
            region = read.region(shape or tuple(tensor.shape), self.sizes, where)
        record = Record(
            id=TensorId.parse(name),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            region=region,
            pending=read.pending,
            layout=layout or "",
            by=(by or RULE) if region is not None else None,
            microbatch=microbatch,
            values=values,
        )
        if self.num_buckets and region is not None and tensor.numel() > self.num_buckets:
            tensor = compute_sketch(tensor, region, self.num_buckets)
            record = replace(record, sketch=SketchInfo(self.num_buckets))
        self._records[rank].append((record, tensor))

    def record_parts(
        self, name: str, full: torch.Tensor, layout: str = "...", *, ranks: Sequence[int] | None = None
    ) -> None:
        """Record every rank's and microbatch's part of a logical tensor; summands of a pending sum are unequal."""
        read = Layout.parse(layout)
        microbatches = range(self.sizes[MICROBATCH_AXIS] if MICROBATCH_AXIS in read.axes else 1)
        for rank in range(self.mesh.num_ranks) if ranks is None else ranks:
            for microbatch in microbatches:
                where = {**self.mesh.coord(rank), MICROBATCH_AXIS: microbatch}
                part = read.region(tuple(full.shape), self.sizes, where).take(full)
                for axis in read.pending:
                    part = part * summand_share(where[axis], self.sizes[axis])
                self.record(rank, name, part, layout, shape=tuple(full.shape), microbatch=microbatch)

    def close(
        self, *, without: Sequence[int] = (), unfinished: Sequence[int] = (), problems: Sequence[str] = ()
    ) -> Trace:
        """Write the traces of all ranks, except those in `without`; the `unfinished` ones have no end."""
        for rank in sorted(set(self._records) - set(without)):
            owned = self._owns[rank] | {record.id.name for record, _ in self._records[rank]}
            modules = {name: ModuleInfo(type="tests.Module", source="model.py:1") for name in sorted(owned)}
            modules |= self.modules
            writer = Writer(self.folder, Manifest(rank=rank, modules=modules, **self._manifest))
            for record, tensor in self._records[rank]:
                writer.write(record, tensor)
            for one in self.collectives[rank]:
                writer.write_collective(encode_collective(one))
            end = End(
                num_steps=self.num_steps,
                grad_factor=self.grad_factor,
                splits=self.splits,
                batch_axes=self.batch_axes,
                forward_buffers=self.forward_buffers,
                samples=self.samples[rank],
                replaced=self.replaced[rank],
                initial=self.initial[rank],
                stale=self.stale.get(rank),
                num_samples=self.num_samples[rank],
                problems=tuple(problems),
                **self.end,
            )
            writer.close(end)
            if rank in unfinished:
                (writer.folder / "end.json").unlink()
        return Trace(self.folder)


def summand_share(index: int, size: int) -> float:
    """Return the share of one rank's summand in the whole."""
    return 2.0 * (index + 1) / (size * (size + 1))


class Case:
    """A reference of one rank, its twin, and a candidate on a mesh."""

    def __init__(
        self, folder: Path, mesh: str = "tp=2", *, noise: float = 1e-6, num_buckets: int = 0, **candidate: Any
    ) -> None:
        """With `num_buckets`, all traces hold sketches of larger tensors."""
        self.noise = noise
        self.reference = TraceBuilder(folder / "reference", role="reference", num_buckets=num_buckets)
        self.twin = TraceBuilder(folder / "twin-1", role="twin", num_buckets=num_buckets)
        self.candidate = TraceBuilder(folder / "candidate", mesh, num_buckets=num_buckets, **candidate)

    def add_trusted(self, name: str, full: torch.Tensor, *, noise: float | None = None, layout: str = "...") -> None:
        """Add a tensor to the reference and, with noise, to the twin."""
        self.reference.record_parts(name, full, layout)
        self.twin.record_parts(name, nudge(full, self.noise if noise is None else noise), layout)

    def add(
        self, name: str, full: torch.Tensor, layout: str = "...", change: Change | None = None, **trusted: Any
    ) -> None:
        """Add a tensor to all traces; the candidate's is changed before it is divided over the ranks."""
        self.add_trusted(name, full, **trusted)
        self.candidate.record_parts(name, full if change is None else change(full), layout)

    def add_right(self, *names: str) -> None:
        for name in names:
            self.add(name, draw_tensor(4, 8, seed=len(name)), "a b/tp")

    def add_wrong(self, *names: str) -> None:
        for name in names:
            self.add(name, draw_tensor(4, 8, seed=len(name)), "a b/tp", lambda x: x + draw_tensor(4, 8, seed=7))

    def judge(self, *, margin: float = MARGIN) -> Judgement:
        return check(self.reference.close(), [self.twin.close()], self.candidate.close(), margin=margin)


def find_comparison(judgement: Judgement, name: str) -> Comparison:
    return next(comparison for comparison in judgement.comparisons if str(comparison.id) == name)
