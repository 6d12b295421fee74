"""Configuration of a traced run; `ttrace run` passes it on in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from ttrace.errors import CaptureError, TraceError
from ttrace.layouts.pattern import matches
from ttrace.tensors.ids import Kind, Site
from ttrace.trace.storage.seal import open_document, seal_document
from ttrace.trace.storage.store import Place, parse_place
from ttrace.trace.writer import MAX_BYTES_HELD
from ttrace.values.sketch import NUM_BUCKETS


class Plan(BaseModel):
    """What to trace, where to put it, and what to replace."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    out: Path
    role: Literal["reference", "echo", "twin", "candidate"] = "reference"
    reference: Path | None = None
    """The reference's trace: where shapes and distributions come from. Twins and candidates need it."""
    store: str = ""
    """A URL under which traces are kept in place of the disk: this one and the reference's, by the names of their
    folders."""
    launch: str = ""
    """Another one for each launch: a process that outlived its own must not write into the trace of the next."""
    twin: int = 0
    """Which draw of the nudge a twin uses."""
    seed: int = 0
    num_steps: int = 1
    parameters: Literal["generated", "own"] = "generated"
    decisions: Literal["replayed", "own"] = "replayed"
    """Whether twins and candidates choose as the reference did where numbers decide, as routers do."""
    isolated: bool = False
    """Generate what enters every module, forward and backward, so that each is judged alone."""
    inside: tuple[str, ...] = ()
    """The modules whose calls of torch functions to record."""
    grad_factor: float = 1.0
    """In isolation: what the candidate's reduction still applies to gradients, as its ordinary run said."""
    compiled: Literal["eager", "boundary"] = "eager"
    """What becomes of compiled code while traced: it runs eagerly or, in a candidate, as it is, seen from outside."""
    microbatch_grads: bool = False
    """Record what each microbatch adds to a parameter's gradient, besides the final gradient."""
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    record: Literal["full", "sketch"] = "full"
    """What is stored of large tensors: all their values, or a sketch."""
    full: tuple[str, ...] = ()
    """Sites that are recorded in full in any case."""
    num_buckets: PositiveInt = NUM_BUCKETS
    """How many numbers a sketch has."""
    max_bytes_held: PositiveInt = MAX_BYTES_HELD
    """What recording may hold in the host's memory at any time: the arena through which tensors are written, and those
    that must be copied first: from an accelerator, or because they do not lie in order."""
    stop: bool = True
    """End the script after the last traced step."""
    then: tuple[Plan, ...] = ()
    """What follows in the same process, each from the state in which this plan began."""

    @property
    def written(self) -> Place:
        """Where the trace goes."""
        return self._in_store(self.out)

    @property
    def trusted(self) -> Place | None:
        """Where the reference's trace is."""
        return None if self.reference is None else self._in_store(self.reference)

    @property
    def claim(self) -> Path | None:
        """The file that says which launch the trace belongs to; None for a plan that no launcher wrote."""
        return claim_of(self.out) if self.launch else None

    def address(self, path: Path) -> str:
        """What a script is told in order to find this plan at this path, and no other one that replaced it."""
        return f"{path}{_BEFORE_LAUNCH}{self.launch}" if self.launch else str(path)

    def _in_store(self, folder: Path) -> Place:
        return parse_place(f"{self.store.rstrip('/')}/{folder.name}") if self.store else folder

    def wants(self, site: Site) -> bool:
        """Whether to record this site; parameters and batches are always recorded: they say what was generated."""
        if site.kind in (Kind.PARAM, Kind.BATCH):
            return True
        if self.only and not any(matches(pattern, site) for pattern in self.only):
            return False
        return not any(matches(pattern, site) for pattern in self.skip)

    def sketches(self, site: Site) -> bool:
        """Whether a sketch of this site is enough; what is replayed from the reference is recorded in full."""
        if self.record == "full" or site.kind in (Kind.BATCH, Kind.DECISION):
            return False
        return not any(matches(pattern, site) for pattern in self.full)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(seal_document(self.model_dump_json(indent=1)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Plan:
        try:
            return cls.model_validate_json(open_document(path.read_text(encoding="utf-8"), str(path)))
        except (OSError, ValueError, RecursionError, TraceError) as error:
            raise CaptureError(f"{path} is no plan: {error}") from None

    @classmethod
    def find(cls, address: str) -> Plan:
        """The plan that an address names; refused if a later launch has replaced it meanwhile."""
        path, _, launch = address.rpartition(_BEFORE_LAUNCH)
        if not re.fullmatch("[0-9a-f]{32}", launch):
            return cls.load(Path(address))
        plan = cls.load(Path(path))
        if plan.launch != launch:
            raise CaptureError(f"{path} is the plan of a later launch: this process outlived its own, and ends here.")
        return plan


_BEFORE_LAUNCH = "#"


def claim_of(out: Path) -> Path:
    """The file beside a trace that holds the id of the launch that it belongs to."""
    return out.parent / f"{out.name}.launch"
