"""The trace format: what a rank's manifest, records and end hold.

`docs/reference/trace-format.md` is the specification. `lines/record_line.py` encodes and decodes records.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ttrace.errors import TraceError
from ttrace.layouts.ids import ROOT, Kind, TensorId
from ttrace.layouts.region import Region
from ttrace.layouts.source import LayoutSource, Provenance
from ttrace.text import clean_line
from ttrace.untrusted import MOST
from ttrace.values.generate import Distribution
from ttrace.values.stats import Stats

FORMAT = 4
MANIFEST, RECORDS, END = "manifest.json", "records.jsonl", "end.json"

_NAME = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9_.-]{0,254})?")  # no name of a file is longer
Line = Annotated[str, AfterValidator(clean_line)]
"""A text of a trace: one line, which shows all that it holds."""
Count = Annotated[int, Field(ge=0, le=MOST)]
PositiveCount = Annotated[int, Field(ge=1, le=MOST)]
Seed = Annotated[int, Field(ge=-MOST - 1, le=2 * MOST + 1)]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The dtypes a record may have, under safetensors' names."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def rank_folder(rank: int) -> str:
    return f"rank-{rank:05d}"


def chunk_file(number: int) -> str:
    return f"chunk-{number:04d}.safetensors"


class ModuleInfo(BaseModel):
    """One module of the census: its class and where that class is defined."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Line
    source: Line = ""


class Attachment(BaseModel):
    """What automatic attachment found in a script."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Line
    """The class of the model, and of what wraps it."""
    optimizers: tuple[Line, ...]
    data: Line
    """Where data enters, in words."""
    keeps_data: bool = False
    """Whether the script's own data was kept."""
    num_microbatches: Count
    """The number of microbatches of this rank's first step."""
    labels: bool
    """Whether it is known where labels enter. If not, a loss that differs may come from other labels."""


class Operation(BaseModel):
    """One torch function that a module's own code called."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: Line
    """The slot of its result: the function's name, and a number."""
    source: Line
    """The file and line of the script that called it."""
    takes: tuple[Line, ...] = ()
    """What it takes: slots of other operations, `input`, and names of parameters, as far as they are known."""
    is_view: bool = False
    """Whether its result is a view, whose values are not recorded again."""
    backward: Line = ""
    """The file and line of its backward, if that is a custom autograd function's."""
    collectives: tuple[Count, ...] = ()
    """The collectives that changed its result before it was used: their orders in the ledger."""


class Manifest(BaseModel):
    """What is known of a rank before its first record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    role: Line
    rank: Count
    num_ranks: PositiveCount
    mesh: Line
    seed: Seed
    launch: Line = ""
    """A different text for each launch, the same on all its ranks; empty if no launcher wrote the plan."""
    num_microbatches: PositiveCount = 1
    first_step: Count = 0
    """The first traced step: of those before it, another launch has made the checkpoint that this one loaded."""
    isolated: bool = False
    """Whether the inputs of modules were replaced."""
    modules: dict[Line, ModuleInfo] = {}
    parameters: dict[Line, bool] = {}
    """Every parameter this rank owns, and whether it is trained."""
    aliases: dict[Line, Line] = {}
    padding: dict[Line, PositiveCount] = {}
    """Rows that a parameter has only as padding: the other side of a port does not have them."""
    opaque: tuple[Line, ...] = ()
    """Compiled modules that ran compiled: nothing inside them was recorded."""
    passed: tuple[Line, ...] = ()
    """Blocks that an isolated reference did not run: an identical block ran in their place."""
    divided: tuple[Line, ...] = (ROOT,)
    """Modules of which each pipeline stage has a part: only the end stages see their inputs and outputs."""
    untraced: tuple[Kind, ...] = ()
    """Kinds that this run has, but at no moment when they can be recorded."""
    reduced: tuple[Line, ...] = ()
    """Axes over which the framework reduces gradients: along them final gradients are equal, bit for bit."""
    measured: Line | None = None
    """The launch of the run against which tensors were measured instead of stored; None if none were."""
    notes: tuple[Line, ...] = ()
    attachment: Attachment | None = None
    """What automatic attachment found; None if the script attached by itself."""
    versions: dict[Line, Line] = {}
    environment: dict[Line, Line] = {}
    """The variables that change how training computes."""


class End(BaseModel):
    """What is known of a rank after its last record; its presence says that the rank finished."""

    # A factor that is not finite must survive, so that the reader can refuse it (trace/agreement.py).
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    num_records: Count = 0
    records_sum: Line = ""
    """The CRC-32 of all lines, so that a removed or doubled line is noticed."""
    collectives_sum: Line = ""
    """The CRC-32 of the whole ledger of collectives; empty if there is none."""
    num_steps: Count
    launch: Line = ""
    """As in the manifest."""
    grad_factor: float = 1.0
    """The factor that this side's gradient reduction still applies to activation gradients; some know it only late."""
    unloaded: tuple[Line, ...] = ()
    """Of a run that goes on from a checkpoint, what it did not change, though it changed others."""
    random: tuple[Line, ...] = ()
    """The innermost modules that drew random numbers."""
    splits: dict[Line, Line] = {}
    """How axes cut activations, as the framework states it, for layouts that are inferred."""
    batch_axes: tuple[Line, ...] = ()
    """The axes along which each rank had some rows of the reference's batch."""
    settings: tuple[dict[Line, Line], ...] = ()
    """The optimizer's distinct settings."""
    settings_of: dict[Line, Count] = {}
    """By parameter, an index into `settings`."""
    forward_buffers: tuple[Line, ...] = ()
    """The buffers that forward passes change; recorded by the reference."""
    samples: dict[Line, tuple[Line, ...]] = {}
    """Of data that the script kept, by step and slot: a digest of each row that this rank had."""
    replaced: dict[Line, tuple[Line, ...]] = {}
    """The same of data that generated ones replaced, if they were on the host."""
    flags: dict[Line, Line] = {}
    """Settings of torch that change how kernels round, and the device, at the end of the last step."""
    problems: tuple[Line, ...] = ()
    notes: tuple[Line, ...] = ()
    operations: dict[Line, tuple[Operation, ...]] = {}
    """Of modules whose calls of torch functions were recorded, those of the first call, in order."""
    sources: dict[str, str] = {}
    """The files that this rank loaded, and their fingerprints."""
    against: Line = ""
    """The trace in the same folder to which this one is stored as a difference; empty if it is not archived."""

    @model_validator(mode="after")
    def _check_settings(self) -> End:
        if not _NAME.fullmatch(self.against):
            raise ValueError("against must be the name of a trace beside this one")
        if any(number >= len(self.settings) for number in self.settings_of.values()):
            raise ValueError("settings_of names settings that are not there")
        return self


@dataclass(frozen=True, slots=True)
class SketchInfo:
    """What is stored of a tensor in place of its values."""

    num_buckets: int
    mean: float = 0.0
    """The mean of this shard; recorded by the reference only."""

    def with_mean(self, mean: float) -> SketchInfo:
        """Return the same with the mean of the values; 0 if they are not finite."""
        return SketchInfo(self.num_buckets, mean if math.isfinite(mean) else 0.0)


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor as one rank held it: what it is, which region it holds, and where its bytes are."""

    id: TensorId
    shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region | None
    """None: nobody stated a layout."""
    pending: tuple[str, ...] = ()
    layout: str = ""
    by: Provenance | None = None
    """Who decided the layout."""
    order: int = 0
    microbatch: int = 0
    values: Distribution | None = None
    sketch: SketchInfo | None = None
    chunk: int = 0
    begin: int = 0
    end: int = 0
    crc: int = 0
    """The CRC-32C of these bytes."""
    stats: Stats | None = None
    """How far the tensor is from the same tensor of another run, in place of its values. The bytes are then the flat
    indices of elements that are zero in the other run only."""
    time: int = field(default=0, compare=False)
    """When it was recorded, in microseconds since 1970."""

    @property
    def source(self) -> LayoutSource | None:
        """Who decided the layout; None if nobody did."""
        return self.by.source if self.by else None

    @property
    def stored_form(self) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of what is stored: the tensor, its sketch, or the indices that belong to its stats."""
        if self.stats is not None:
            return ((self.end - self.begin) // torch.int64.itemsize,), torch.int64
        return (self.shape, self.dtype) if self.sketch is None else ((self.sketch.num_buckets,), torch.float64)

    @property
    def num_bytes(self) -> int:
        shape, dtype = self.stored_form
        return math.prod(shape) * dtype.itemsize

    @property
    def has_values(self) -> bool:
        """Whether the values are known, and not only a sketch of them or how far they are from others."""
        return self.sketch is None and self.stats is None

    def with_mean(self, mean: float) -> Record:
        """Return this record of a sketch with the mean of the values."""
        assert self.sketch is not None
        return replace(self, sketch=self.sketch.with_mean(mean))

    @property
    def is_generated(self) -> bool:
        """Whether no bytes are stored, because `values` generates them all."""
        is_empty = self.begin == self.end and self.stats is None
        return self.values is not None and self.region is not None and is_empty


def is_fitting(record: Record) -> bool:
    """Whether a record's region is of the shape of its data."""
    return record.region is None or record.region.local_shape == record.shape


def check_place(record: Record) -> None:
    """Refuse bytes that end before they begin, or that begin between two numbers, where none are written."""
    if record.begin > record.end:
        raise TraceError(f"{record.id}: its bytes begin at {record.begin}, after their end at {record.end}.")
    if record.begin % 8:
        raise TraceError(f"{record.id}: its bytes begin at {record.begin}, which is no multiple of 8.")


def check_region(record: Record) -> None:
    """Refuse a record whose region is of another shape than its data."""
    if not is_fitting(record):
        assert record.region is not None
        needed = record.region.local_shape
        raise TraceError(f"{record.id}: its region {record.region} has shape {needed}, its data {record.shape}.")


def is_update_known(before: Record, after: Record) -> bool:
    """Whether what a step did follows from two records of a parameter."""
    if before.shape == after.shape and before.sketch is not None and after.sketch is not None:
        return before.sketch.num_buckets == after.sketch.num_buckets
    if before.sketch is not None:
        return before.values is not None and before.id.step == 0 and after.region is not None
    if before.shape == after.shape:
        return after.sketch is None or after.region is not None
    if after.region is None or not after.region.flat:
        return False
    return max(stop for _, stop in after.region.flat) <= math.prod(before.shape)
