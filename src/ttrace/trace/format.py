"""The trace format: what a rank's manifest, records and end hold.

`docs/reference/trace-format.md` is the specification. `lines/record_line.py` encodes and decodes records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, model_validator

from ttrace.errors import TraceError
from ttrace.layouts.source import LayoutSource, Provenance
from ttrace.tensors.ids import ROOT, Kind, TensorId
from ttrace.tensors.region import Region
from ttrace.values.generate import Distribution
from ttrace.values.stats import Stats

FORMAT = 4
MANIFEST, RECORDS, END = "manifest.json", "records.jsonl", "end.json"

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

    type: str
    source: str = ""


class Attachment(BaseModel):
    """What automatic attachment found in a script."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    """The class of the model, and of what wraps it."""
    optimizers: tuple[str, ...]
    data: str
    """Where data enters, in words."""
    keeps_data: bool = False
    """Whether the script's own data was kept."""
    num_microbatches: NonNegativeInt
    """The number of microbatches of this rank's first step."""
    labels: bool
    """Whether it is known where labels enter. If not, a loss that differs may come from other labels."""


class Operation(BaseModel):
    """One torch function that a module's own code called."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: str
    """The slot of its result: the function's name, and a number."""
    source: str
    """The file and line of the script that called it."""
    takes: tuple[str, ...] = ()
    """What it takes: slots of other operations, `input`, and names of parameters, as far as they are known."""
    is_view: bool = False
    """Whether its result is a view, whose values are not recorded again."""
    backward: str = ""
    """The file and line of its backward, if that is a custom autograd function's."""
    collectives: tuple[NonNegativeInt, ...] = ()
    """The collectives that changed its result before it was used: their orders in the ledger."""


class Manifest(BaseModel):
    """What is known of a rank before its first record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    role: str
    rank: NonNegativeInt
    num_ranks: PositiveInt
    mesh: str
    seed: int
    launch: str = ""
    """A different text for each launch, the same on all its ranks; empty if no launcher wrote the plan."""
    num_microbatches: PositiveInt = 1
    first_step: NonNegativeInt = 0
    """The first traced step: of those before it, another launch has made the checkpoint that this one loaded."""
    isolated: bool = False
    """Whether the inputs of modules were replaced."""
    modules: dict[str, ModuleInfo] = {}
    parameters: dict[str, bool] = {}
    """Every parameter this rank owns, and whether it is trained."""
    aliases: dict[str, str] = {}
    padding: dict[str, PositiveInt] = {}
    """Rows that a parameter has only as padding: the other side of a port does not have them."""
    opaque: tuple[str, ...] = ()
    """Compiled modules that ran compiled: nothing inside them was recorded."""
    passed: tuple[str, ...] = ()
    """Blocks that an isolated reference did not run: an identical block ran in their place."""
    divided: tuple[str, ...] = (ROOT,)
    """Modules of which each pipeline stage has a part: only the end stages see their inputs and outputs."""
    untraced: tuple[Kind, ...] = ()
    """Kinds that this run has, but at no moment when they can be recorded."""
    reduced: tuple[str, ...] = ()
    """Axes over which the framework reduces gradients: along them final gradients are equal, bit for bit."""
    measured: str | None = None
    """The launch of the run against which tensors were measured instead of stored; None if none were."""
    notes: tuple[str, ...] = ()
    attachment: Attachment | None = None
    """What automatic attachment found; None if the script attached by itself."""
    versions: dict[str, str] = {}
    environment: dict[str, str] = {}
    """The variables that change how training computes."""


class End(BaseModel):
    """What is known of a rank after its last record; its presence says that the rank finished."""

    # A factor that is not finite must survive, so that the reader can refuse it (trace/agreement.py).
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    num_records: int = 0
    records_sum: str = ""
    """The CRC-32 of all lines, so that a removed or doubled line is noticed."""
    collectives_sum: str = ""
    """The CRC-32 of the whole ledger of collectives; empty if there is none."""
    num_steps: int
    launch: str = ""
    """As in the manifest."""
    grad_factor: float = 1.0
    """The factor that this side's gradient reduction still applies to activation gradients; some know it only late."""
    unloaded: tuple[str, ...] = ()
    """Of a run that goes on from a checkpoint, what it did not change, though it changed others."""
    random: tuple[str, ...] = ()
    """The innermost modules that drew random numbers."""
    splits: dict[str, str] = {}
    """How axes cut activations, as the framework states it, for layouts that are inferred."""
    batch_axes: tuple[str, ...] = ()
    """The axes along which each rank had some rows of the reference's batch."""
    settings: tuple[dict[str, str], ...] = ()
    """The optimizer's distinct settings."""
    settings_of: dict[str, NonNegativeInt] = {}
    """By parameter, an index into `settings`."""
    forward_buffers: tuple[str, ...] = ()
    """The buffers that forward passes change; recorded by the reference."""
    samples: dict[str, tuple[str, ...]] = {}
    """Of data that the script kept, by step and slot: a digest of each row that this rank had."""
    flags: dict[str, str] = {}
    """Settings of torch that change how kernels round, and the device, at the end of the last step."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    operations: dict[str, tuple[Operation, ...]] = {}
    """Of modules whose calls of torch functions were recorded, those of the first call, in order."""
    sources: dict[str, str] = {}
    """The files that this rank loaded, and their fingerprints."""
    against: str = ""
    """The trace in the same folder to which this one is stored as a difference; empty if it is not archived."""

    @model_validator(mode="after")
    def _check_settings(self) -> End:
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


def check_region(record: Record) -> None:
    """Refuse a record whose region is of another shape than its data."""
    if not is_fitting(record):
        assert record.region is not None
        needed = record.region.local_shape
        raise TraceError(f"{record.id}: its region {record.region} has shape {needed}, its data {record.shape}.")
