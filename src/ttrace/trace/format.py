"""The trace format: the fields of a rank's manifest, records and end.

`docs/reference/trace-format.md` is the specification, `lines.py` encodes and decodes records. The JSON documents
(manifest and end) carry a checksum, and are refused if they were changed after they were written.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ttrace.errors import TraceError
from ttrace.layouts.ids import ROOT, Kind, TensorId
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.layouts.region import Region
from ttrace.trace.seal import open_document, seal_document
from ttrace.untrusted import MOST, clean_line, parse_json
from ttrace.values.generate import Distribution
from ttrace.values.stats import Stats

FORMAT = 4
INITIAL_RATE, NEXT_RATE = "initial_lr", "next_lr"
"""Settings of an optimizer that do not decide the update of this step."""
MANIFEST, RECORDS, END = "manifest.json", "records.jsonl", "end.json"

Line = Annotated[str, AfterValidator(clean_line)]
"""A text in a trace: one line, without invisible characters."""
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
"""The dtypes that a record may have, by their names in safetensors."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_RANK = re.compile(r'(?<="rank": )(0|[1-9][0-9]{0,9})(?=,)')
_Model = TypeVar("_Model", bound=BaseModel)


def rank_folder(rank: int) -> str:
    return f"rank-{rank:05d}"


def chunk_file(number: int) -> str:
    return f"chunk-{number:04d}.safetensors"


class ModuleInfo(BaseModel):
    """One module of the model: its class, and where that class is defined."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Line
    source: Line = ""
    settings: dict[Line, Line] = {}
    """Numbers that it was made with: of torch's own modules those of a list, of others their attributes of type float.

    Dropout is recorded as the script set it, before TTrace switches it off.
    """


class Attachment(BaseModel):
    """What automatic attachment found in a script."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Line
    """The classes of the model and of its wrappers."""
    optimizers: tuple[Line, ...]
    data: Line
    """Where data enters, as a text for the report."""
    keeps_data: bool = False
    """Whether the script's own data was kept."""
    num_microbatches: Count
    """The number of microbatches of this rank's first step."""
    labels: bool
    """Whether it is known where labels enter. If not, a difference of the loss may come from different labels."""
    class_counts: tuple[Count, ...] = ()
    """The numbers of classes in the logits of the first step."""


class InitialValues(BaseModel):
    """What a parameter of this rank held before generated values replaced it: sums, not the values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    crc: Count
    """The CRC-32C of the bytes."""
    mean: float
    std: float
    repeats: bool = False
    """Whether equal parts of it, one beside the other along some dim, may hold the same values."""

    @property
    def is_constant(self) -> bool:
        return self.std <= 1e-6 * abs(self.mean)


class Operation(BaseModel):
    """One torch function that a module's own code called."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: Line
    """The slot of its result: the function's name and a number."""
    source: Line
    """The file and line of the script that called it."""
    takes: tuple[Line, ...] = ()
    """The known sources of its arguments: slots of other operations, `input`, and names of parameters."""
    is_view: bool = False
    """Whether its result is a view. The values of views are not recorded again."""
    backward: Line = ""
    """The file and line of its backward, for a custom autograd function."""
    collectives: tuple[Count, ...] = ()
    """The positions in the ledger of collectives that changed its result before it was used."""


class Manifest(BaseModel):
    """Facts about a rank that are known before its first record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    role: Line
    rank: Count
    num_ranks: PositiveCount
    mesh: Line
    seed: Seed
    launch: Line = ""
    """A unique text for each launch, the same on all of its ranks; empty if no launcher wrote the plan."""
    num_microbatches: PositiveCount = 1
    first_step: Count = 0
    """The first traced step. Another launch ran the steps before it and saved the checkpoint that this one loaded."""
    isolated: bool = False
    """Whether each module ran on generated inputs."""
    modules: dict[Line, ModuleInfo] = {}
    parameters: dict[Line, bool] = {}
    """Every parameter of this rank, and whether it is trained."""
    aliases: dict[Line, Line] = {}
    padding: dict[Line, PositiveCount] = {}
    """The number of padding rows of parameters: the other side of a port does not have them."""
    opaque: tuple[Line, ...] = ()
    """Modules that ran compiled, so nothing inside them was recorded."""
    passed: tuple[Line, ...] = ()
    """Blocks that an isolated reference did not run: an identical block ran in their place."""
    divided: tuple[Line, ...] = (ROOT,)
    """Modules that are divided over pipeline stages: only the first and the last stage see their inputs and outputs."""
    untraced: tuple[Kind, ...] = ()
    """Kinds of tensors that exist in this run but can never be recorded."""
    reduced: tuple[Line, ...] = ()
    """Axes over which the framework reduces gradients, so along them final gradients have the same bits."""
    measured: Line | None = None
    """The launch that tensors were measured against instead of being stored; None if they were stored."""
    dropout: tuple[Line, ...] = ()
    """Modules whose dropout was switched off."""
    notes: tuple[Line, ...] = ()
    attachment: Attachment | None = None
    """What automatic attachment found; None if the script attached by itself."""
    versions: dict[Line, Line] = {}
    environment: dict[Line, Line] = {}
    """The environment variables that affect the computation."""


class End(BaseModel):
    """Facts about a rank that are known after its last record. Its presence means that the rank finished."""

    # A factor that is not finite is written as such, so that the reader can refuse it (trace/agreement.py).
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    num_records: Count = 0
    records_sum: Line = ""
    """The CRC-32 of all lines, which detects removed and repeated lines."""
    collectives_sum: Line = ""
    """The CRC-32 of the whole ledger of collectives; empty if there is none."""
    num_steps: Count
    launch: Line = ""
    """The launch, as in the manifest."""
    grad_factor: float = 1.0
    """The factor that the gradient reduction still applies to activation gradients. Some adapters learn it late."""
    unloaded: tuple[Line, ...] = ()
    """Parameters and buffers that loading a checkpoint did not change, although it changed others."""
    initial: dict[Line, InitialValues] = {}
    """For parameters whose values were replaced: what they held before, as far as it was what the script trains."""
    stale: tuple[Line, ...] | None = None
    """The parameters whose gradients were not zero when the first backward pass of a step began; None if no backward
    pass was observed."""
    random: tuple[Line, ...] = ()
    """The innermost modules that drew random numbers."""
    splits: dict[Line, Line] = {}
    """How axes cut activations, as stated by the framework; used when layouts are inferred."""
    batch_axes: tuple[Line, ...] = ()
    """The axes along which each rank had some rows of the reference's batch."""
    settings: tuple[dict[Line, Line], ...] = ()
    """The optimizer's distinct settings."""
    settings_of: dict[Line, Count] = {}
    """For each parameter, an index into `settings`."""
    evaluated: tuple[Line, ...] = ()
    """Modules of torch that training mode changes, and that were not in it when the optimizer stepped."""
    forward_buffers: tuple[Line, ...] = ()
    """The buffers that forward passes change. Only the reference records this."""
    samples: dict[Line, tuple[Line, ...]] = {}
    """For data of the script, by step and slot: a digest of each row of this rank."""
    replaced: dict[Line, tuple[Line, ...]] = {}
    """Digests, as in `samples`, of data that generated values replaced, if they were on the host."""
    num_samples: Count = 0
    """The length of the dataset that this rank's loader draws as a whole, sample by sample; 0 if there is none."""
    flags: dict[Line, Line] = {}
    """Settings of torch that affect the rounding of kernels, and the device, at the end of the last step."""
    problems: tuple[Line, ...] = ()
    notes: tuple[Line, ...] = ()
    operations: dict[Line, tuple[Operation, ...]] = {}
    """For modules whose calls of torch functions were recorded: the functions of the first call, in order."""
    sources: dict[str, str] = {}
    """The source files that this rank loaded, and their fingerprints."""
    against: Line = Field(default="", exclude=True)
    """Version 0.2 wrote this field into every trace. It is not empty in its archives, which are refused."""

    @model_validator(mode="after")
    def _check_settings(self) -> End:
        if any(number >= len(self.settings) for number in self.settings_of.values()):
            raise ValueError("settings_of refers to settings that are not there")
        return self


@dataclass(frozen=True, slots=True)
class SketchInfo:
    """The form of a sketch that is stored instead of values."""

    num_buckets: int
    mean: float = 0.0
    """The mean of this shard. Only the reference records it."""

    def with_mean(self, mean: float) -> SketchInfo:
        """Return this with a mean of the values; 0 if it is not finite."""
        return SketchInfo(self.num_buckets, mean if math.isfinite(mean) else 0.0)


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor as one rank held it: its id, its region of the logical tensor, and the place of its bytes."""

    id: TensorId
    shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region | None
    """None if no layout was stated."""
    pending: tuple[str, ...] = ()
    layout: str = ""
    by: Provenance | None = None
    """The source of the layout."""
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
    """The difference to the same tensor of another run, in place of values. The bytes are then the flat indices of
    elements that are zero only in the other run."""
    time: int = field(default=0, compare=False)
    """The time of recording, in microseconds since 1970."""

    @property
    def source(self) -> LayoutSource | None:
        """The source of the layout; None if there is no layout."""
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
        """Whether the values themselves are known, rather than a sketch or a difference to another run."""
        return self.sketch is None and self.stats is None

    def with_mean(self, mean: float) -> Record:
        """Return this record of a sketch with a mean of the values."""
        assert self.sketch is not None
        return replace(self, sketch=self.sketch.with_mean(mean))

    @property
    def is_generated(self) -> bool:
        """Whether no bytes are stored, because `values` generates them all."""
        is_empty = self.begin == self.end and self.stats is None
        return self.values is not None and self.region is not None and is_empty


def is_fitting(record: Record) -> bool:
    """Return whether a record's region has the shape of its data."""
    return record.region is None or record.region.local_shape == record.shape


def check_place(record: Record) -> None:
    """Raise TraceError for bytes that end before they begin, or whose first byte is not aligned to 8."""
    if record.begin > record.end:
        raise TraceError(f"{record.id}: its bytes begin at {record.begin}, after their end at {record.end}.")
    if record.begin % 8:
        raise TraceError(f"{record.id}: its bytes begin at {record.begin}, which is not a multiple of 8.")


def check_region(record: Record) -> None:
    """Raise TraceError for a record whose region does not have the shape of its data."""
    if not is_fitting(record):
        assert record.region is not None
        needed = record.region.local_shape
        raise TraceError(f"{record.id}: its region {record.region} has shape {needed}, its data {record.shape}.")


def is_update_known(before: Record, after: Record) -> bool:
    """Return whether an update can be computed from the records of a parameter before and after the step."""
    if before.shape == after.shape and before.sketch is not None and after.sketch is not None:
        return before.sketch.num_buckets == after.sketch.num_buckets
    if before.sketch is not None:
        return before.values is not None and before.id.step == 0 and after.region is not None
    if before.shape == after.shape:
        return after.sketch is None or after.region is not None
    if after.region is None or not after.region.flat:
        return False
    return max(stop for _, stop in after.region.flat) <= math.prod(before.shape)


def parse_manifest(text: str, where: str) -> Manifest:
    """Parse a rank's manifest. Manifests that differ only in the rank share everything else in memory."""
    text = _open(text, where)
    before, *rest = _RANK.split(text, maxsplit=1)
    if len(rest) == 2:
        with suppress(TraceError):
            shared = _manifest_around(before, rest[1])
            if shared.rank == 7:
                return shared.model_copy(update={"rank": int(rest[0])})
    return _validate(Manifest, text, where)


def parse_end(text: str, where: str) -> End:
    return _validate(End, _open(text, where), where)


def seal_model(model: BaseModel) -> str:
    """Return the text of the file of a document, with its checksum."""
    return seal_document(model.model_dump_json(indent=1))


@lru_cache(maxsize=128)
def _manifest_around(before: str, after: str) -> Manifest:
    return _validate(Manifest, f"{before}7{after}", "")


def _open(text: str, where: str) -> str:
    try:
        return open_document(text, where)
    except TraceError:
        with suppress(ValueError, AttributeError, RecursionError):  # the first format had no checksums
            _check_format(parse_json(text, where), where)
        raise


def _check_format(document: dict[str, Any], where: str) -> None:
    version = document.get("format", FORMAT)
    if version != FORMAT:
        raise TraceError(f"{where}: format {version}, but this TTrace reads format {FORMAT}. Trace again.")


def _validate(model: type[_Model], text: str, where: str) -> _Model:
    """Parse a document; raise TraceError if it is not valid."""
    try:
        _check_format(parse_json(text, where), where)
        return model.model_validate_json(text, strict=True)
    except (ValueError, AttributeError, RecursionError) as error:
        raise TraceError(f"{where} is damaged: {' '.join(str(error).split())}") from None
