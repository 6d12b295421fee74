"""Configuration of a traced run; `ttrace run` passes it on in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from ttrace.errors import CaptureError, TTraceError
from ttrace.files import read_text, replace_file
from ttrace.layouts.ids import Kind, Site
from ttrace.layouts.pattern import matches
from ttrace.ports.port_map import PortMap
from ttrace.trace.seal import open_document, seal_document
from ttrace.trace.store import Place, parse_place
from ttrace.trace.writer import MAX_BYTES_HELD
from ttrace.values.sketch import NUM_BUCKETS

BUDGET = 2_000_000_000
"""Bytes, as `--budget` has them in GB."""


class Plan(BaseModel):
    """The plan of a traced run: what to trace, where to write it, and what to replace."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    out: Path
    role: Literal["reference", "echo", "twin", "candidate"] = "reference"
    reference: Path | None = None
    """The reference's trace, which shapes and distributions are read from. Twins and candidates need it."""
    store: str = ""
    """A URL under which traces are stored instead of on the disk: this trace and the reference's, by the names of their
    folders."""
    repeats: Path | None = None
    """The candidate's trace, if this is its second run, which is measured against the first."""
    launch: str = ""
    """An id of the launch: a process that outlives its own launch must not write into the trace of the next one."""
    twin: int = 0
    """The number of a twin; each number gives another random nudge."""
    seed: int = 0
    num_steps: int = 1
    first_step: int = 0
    """The number of the first traced step: another launch has trained up to it, and this one loads its checkpoint."""
    parameters: Literal["generated", "own"] = "generated"
    decisions: Literal["replayed", "own"] = "replayed"
    """Whether twins and candidates repeat the reference's discrete decisions, such as those of routers."""
    isolated: bool = False
    """Whether to generate what enters every module, forward and backward, so that each module is judged alone."""
    inside: tuple[str, ...] = ()
    """The modules whose calls of torch functions are recorded."""
    grad_factor: float = 1.0
    """In isolation, the factor that the candidate's reduction still applies to gradients, from its ordinary run."""
    compiled: Literal["eager", "boundary"] = "eager"
    """How compiled code runs in traced steps: eagerly or, in a candidate, compiled, with only its boundary traced."""
    microbatch_grads: bool = False
    """Whether to record what each microbatch adds to a parameter's gradient, besides the final gradient."""
    attach: Literal["auto", "script"] = "auto"
    """Whether TTrace attaches by itself where the script does not."""
    data: Literal["generated", "own"] = "generated"
    """Whether batches are generated, or those of the script are kept and compared."""
    mesh: str = ""
    """The mesh of a script that declares none."""
    rules: dict[str, str] = {}
    """The layouts of a script that declares none, by pattern."""
    port: PortMap | None = None
    """What corresponds on the two sides, if they are different implementations of a model."""
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    record: Literal["auto", "full", "sketch"] = "auto"
    """What is stored of large tensors: all their values, a sketch, or values as far as the budget allows."""
    budget: PositiveInt = BUDGET
    """With `auto`, the most bytes that the traces of both sides take together; where ranks hold replicas they take
    more."""
    full: tuple[str, ...] = ()
    """Sites that are always recorded in full."""
    num_buckets: PositiveInt = NUM_BUCKETS
    """The number of values in a sketch."""
    max_bytes_held: PositiveInt = MAX_BYTES_HELD
    """The most bytes of host memory that recording uses at any time: the arena through which tensors are written, and
    tensors that must be copied first, because they lie on an accelerator or are not contiguous."""
    forward_only: bool = False
    """Whether a step has no backward pass: only what enters and leaves modules is recorded, as one sequence for all
    calls."""
    deterministic: bool = False
    """Whether torch chooses deterministic kernels where it has them."""
    stop: bool = True
    """Whether to end the script after the last traced step."""
    then: tuple[Plan, ...] = ()
    """The plans that follow in the same process; each starts from the state in which this plan started."""

    @property
    def end_step(self) -> int:
        """The number of the step after the last traced one."""
        return self.first_step + self.num_steps

    @property
    def written(self) -> Place:
        """The folder or URL that the trace is written to."""
        return self._in_store(self.out)

    @property
    def trusted(self) -> Place | None:
        """The folder or URL of the reference's trace."""
        return None if self.reference is None else self._in_store(self.reference)

    @property
    def measured(self) -> Place | None:
        """The trace against which tensors are measured instead of stored: for twins, the reference's."""
        if self.repeats is not None:
            return self._in_store(self.repeats)
        return self.trusted if self.role in ("twin", "echo") else None

    @property
    def claim(self) -> Path | None:
        """The file with the id of the launch that the trace belongs to; None for a plan that no launcher wrote."""
        return claim_of(self.out) if self.launch else None

    def address(self, path: Path) -> str:
        """Return the address by which a script finds this plan at this path, and not a later one that replaced it."""
        return f"{path}{_BEFORE_LAUNCH}{self.launch}" if self.launch else str(path)

    def _in_store(self, folder: Path) -> Place:
        return parse_place(f"{self.store.rstrip('/')}/{folder.name}") if self.store else folder

    def wants(self, site: Site) -> bool:
        """Whether to record this site; parameters and batches always are: their records say what was generated."""
        if site.kind in (Kind.PARAM, Kind.BATCH):
            return True
        if self.only and not any(matches(pattern, site) for pattern in self.only):
            return False
        return not any(matches(pattern, site) for pattern in self.skip)

    def keeps_full(self, site: Site) -> bool:
        """Whether this site is always recorded in full."""
        return any(matches(pattern, site) for pattern in self.full)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, seal_document(self.model_dump_json(indent=1)))

    @classmethod
    def load(cls, path: Path) -> Plan:
        try:
            return cls.model_validate_json(open_document(read_text(path), str(path)))
        except (OSError, ValueError, RecursionError, TTraceError) as error:
            raise CaptureError(f"{path} is no plan: {error}") from None

    @classmethod
    def find(cls, address: str) -> Plan:
        """Load the plan that an address names; raise an error if a later launch has replaced it."""
        path, _, launch = address.rpartition(_BEFORE_LAUNCH)
        if not re.fullmatch("[0-9a-f]{32}", launch):
            return cls.load(Path(address))
        plan = cls.load(Path(path))
        if plan.launch != launch:
            raise CaptureError(f"{path} is the plan of a later launch: this process outlived its own, and ends here.")
        return plan


_BEFORE_LAUNCH = "#"


def claim_of(out: Path) -> Path:
    """Return the path of the file beside a trace that holds the id of the trace's launch."""
    return out.parent / f"{out.name}.launch"
