"""The ledger of a rank: its collectives and messages, one line of JSON for each, in the order of their issue.

It is written line by line while the step runs, so after a hang the last line shows where the rank waits.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from ttrace.errors import TraceError
from ttrace.layouts.ids import Phase
from ttrace.layouts.mesh import Mesh
from ttrace.trace.buffered_file import open_lines
from ttrace.trace.format import Count, Line
from ttrace.trace.seal import TRACE_AGAIN, is_intact, seal_line, strip_seal, sum_of

COLLECTIVES = "collectives.jsonl"


class Group(BaseModel):
    """The ranks of a collective: the mesh axes along which they differ, or their numbers if they do not form axes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    axes: tuple[Line, ...] = ()
    ranks: tuple[Count, ...] = ()

    def __str__(self) -> str:
        return "+".join(self.axes) if self.axes else f"ranks {', '.join(map(str, self.ranks))}"

    def list_ranks(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """List the ranks of the group that contains this rank."""
        if not self.axes:
            return self.ranks
        own = mesh.coord(rank)
        parts = [part for part in mesh.factorisations if set(self.axes) <= {axis for axis, _ in part}]
        if not parts:
            raise TraceError(f"a collective runs over {self}, but the mesh is {str(mesh)!r}. {TRACE_AGAIN}")
        rest = [axis for axis, _ in parts[0] if axis not in self.axes]
        return tuple(c.rank for c in mesh.coords() if all(c[axis] == own[axis] for axis in rest))


class Collective(BaseModel):
    """One collective or message, as one rank issued it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    order: Count
    step: Count
    microbatch: Count
    module: Line
    """The innermost module in whose forward or backward it was issued; empty if there is none."""
    phase: Phase
    op: Line
    """Its name in torch.distributed, such as all_reduce."""
    reduction: Line = ""
    """Its reduction, such as sum; empty if it has none, or if it is unknown."""
    group: Group
    peer: Count | None = None
    """For a message, the other rank; for a broadcast and similar collectives, the root."""
    shape: tuple[Count, ...]
    """The shape of the first tensor that this rank contributes."""
    dtype: Line
    num_tensors: Count
    num_bytes: Count
    """The size of everything that this rank contributes."""
    is_async: bool
    source: Line
    """The file and line of the innermost caller that belongs neither to torch nor to TTrace."""
    issuer: Line = ""
    """The part of torch that issued it: FSDP2, DDP, DTensor or pipelining; empty if the caller issued it itself."""
    begin: Count
    """The time of its issue, in microseconds since 1970."""

    @property
    def what(self) -> tuple[object, ...]:
        """What must be the same on all ranks of a group."""
        has_same_shape = self.op in ("all_reduce", "broadcast", "reduce")
        return self.op, self.reduction, self.num_bytes if has_same_shape else None, self.dtype

    @property
    def is_message(self) -> bool:
        return self.op in ("send", "recv")

    def __str__(self) -> str:
        reduction = f" ({self.reduction})" if self.reduction else ""
        over = f"with rank {self.peer}" if self.is_message else f"over {self.group}"
        return f"{self.op}{reduction} {over}"


class Moment(NamedTuple):
    """The position and time at which a rank issues a collective."""

    order: int
    step: int
    microbatch: int
    begin: int


def encode_collective(one: Collective) -> str:
    """Encode a collective as one line of JSON."""
    return encode_at(Moment(one.order, one.step, one.microbatch, one.begin), encode_form(one))


def encode_at(moment: Moment, form: str) -> str:
    """Encode a line from its moment and its form, without pydantic because the training step waits for it."""
    order, step, microbatch, begin = moment
    return f'{{"order":{order},"step":{step},"microbatch":{microbatch},"begin":{begin},{form}}}'


def encode_form(one: Collective) -> str:
    """Encode all fields of a collective except its moment; many lines share this form."""
    return one.model_dump_json(exclude={"order", "step", "microbatch", "begin"})[1:-1]


def decode_collectives(data: bytes, where: str, whole_sum: str | None) -> tuple[Collective, ...]:
    """Decode the lines of a ledger; raise TraceError if they were changed after they were written.

    `whole_sum` is the checksum of all lines; None if the rank did not finish.
    """
    if whole_sum is not None and sum_of(data) != whole_sum:
        raise TraceError(f"{where} is damaged: its lines were changed after they were written. {TRACE_AGAIN}")
    collectives: list[Collective] = []
    for number, line in enumerate(data.decode(errors="replace").split("\n")[:-1], 1):
        try:
            if not is_intact(line):
                raise ValueError("it is not what was written")
            collectives.append(Collective.model_validate_json(strip_seal(line)))
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise TraceError(f"{where} is damaged: line {number}: {reason}. {TRACE_AGAIN}") from None
    return tuple(collectives)


class LedgerFile:
    """The file of a rank's ledger while it is written."""

    def __init__(self, folder: Path) -> None:
        self._file = open_lines(folder / COLLECTIVES)
        self._crc = 0

    def append(self, text: str) -> None:
        """Write a line immediately, because the process may hang in this collective and be killed."""
        line = f"{seal_line(text)}\n".encode()
        self._crc = zlib.crc32(line, self._crc)
        self._file.write(line)

    def close(self) -> str:
        """Close the file; return the checksum of all its lines."""
        self._file.close()
        return f"{self._crc:08x}"
