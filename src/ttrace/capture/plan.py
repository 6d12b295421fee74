"""Configuration of a traced run; `ttrace run` passes it on in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from ttrace.errors import CaptureError, TTraceError
from ttrace.layouts.ids import Kind, Site
from ttrace.layouts.rules import matches
from ttrace.ports.port_map import PortMap
from ttrace.trace.seal import open_document, seal_document
from ttrace.trace.store import Place, parse_place
from ttrace.trace.writer import MAX_BYTES_HELD
from ttrace.untrusted import read_text, replace_file
from ttrace.values.sketch import NUM_BUCKETS

BUDGET = 2_000_000_000
"""Bytes; `--budget` is given in GB."""


class Plan(BaseModel):
    """The plan of a traced run: what to trace, where to write it, and what to replace.

    `ttrace run` writes it to a file, and a traced script reads it there. A trace is valid only for the plan that it was
    made with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Where: this trace, the traces that it refers to, and the launch that writes it.

    out: Path
    role: Literal["reference", "echo", "twin", "candidate"] = "reference"
    reference: Path | None = None
    """The reference's trace, from which shapes and distributions are read. Twins and candidates need it."""
    store: str = ""
    """A URL under which this trace and the reference's are stored instead of on the disk, by the names of their
    folders."""
    repeats: Path | None = None
    """The candidate's trace, if this is its second run, which is measured against the first."""
    launch: str = ""
    """An id of the launch: a process that still runs after its launch must not write into the trace of the next one."""

    # Which iterations.

    twin: int = 0
    """The number of a twin; each number gives a different random nudge."""
    seed: int = 0
    num_steps: int = 1
    first_step: int = 0
    """The number of the first traced step. An earlier launch has trained up to it; this one loads its checkpoint."""

    # What is replaced in these iterations, and what is observed more closely.

    parameters: Literal["generated", "own"] = "generated"
    decisions: Literal["replayed", "own"] = "replayed"
    """Whether twins and candidates repeat the reference's discrete decisions, such as those of routers."""
    isolated: bool = False
    """Whether to generate the inputs and output gradients of every module, so that each module is judged alone."""
    inside: tuple[str, ...] = ()
    """The modules whose calls of torch functions are recorded."""
    grad_factor: float = 1.0
    """In isolation, the factor that the candidate's reduction still applies to gradients, from its ordinary run."""
    compiled: Literal["eager", "boundary"] = "eager"
    """How compiled code runs in traced steps. `eager`: uncompiled, so that every module is traced. `boundary`: in a
    candidate, compiled, so that only its inputs and outputs are traced."""
    microbatch_grads: bool = False
    """Whether to record what each microbatch adds to a parameter's gradient, besides the final gradient."""
    attach: Literal["auto", "script"] = "auto"
    """Whether TTrace attaches by itself where the script does not."""
    data: Literal["generated", "own"] = "generated"
    """Whether batches are generated, or the script's own batches are kept and compared."""

    # What the command line declares for the script.

    mesh: str = ""
    """The mesh of a script that declares none."""
    rules: dict[str, str] = {}
    """The layouts of a script that declares none, by pattern."""
    port: PortMap | None = None
    """What corresponds on the two sides, if they are different implementations of a model."""

    # What is recorded, and how.

    only: tuple[str, ...] = ()
    """Patterns of the sites that are recorded; all sites if empty."""
    skip: tuple[str, ...] = ()
    """Patterns of sites that are not recorded."""
    record: Literal["auto", "full", "sketch"] = "auto"
    """How large tensors are stored. `full`: all values. `sketch`: a sketch. `auto`: all values until the budget is
    reached, then sketches."""
    budget: PositiveInt = BUDGET
    """With `auto`, the most bytes that the traces of both sides take together. They take more if ranks hold
    replicas."""
    full: tuple[str, ...] = ()
    """Sites that are always recorded in full."""
    num_buckets: PositiveInt = NUM_BUCKETS
    """The number of values in a sketch."""
    max_bytes_held: PositiveInt = MAX_BYTES_HELD
    """The most bytes of host memory that recording uses at any time: the arena through which tensors are written, and
    copies of tensors that are on an accelerator or not contiguous."""
    forward_only: bool = False
    """Whether a step has no backward pass. Then only inputs and outputs of modules are recorded, and all calls of a
    module form one sequence."""
    deterministic: bool = False
    """Whether torch chooses deterministic kernels where it has them."""

    # What follows.

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
        """Return the address by which a script finds this plan at this path, and no later plan that replaced it."""
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
            raise CaptureError(f"{path} is not a plan: {error}") from None

    @classmethod
    def find(cls, address: str) -> Plan:
        """Load the plan that an address names; raise an error if a later launch has replaced it."""
        path, _, launch = address.rpartition(_BEFORE_LAUNCH)
        if not re.fullmatch("[0-9a-f]{32}", launch):
            return cls.load(Path(address))
        plan = cls.load(Path(path))
        if plan.launch != launch:
            raise CaptureError(
                f"{path} is the plan of a later launch: this process belongs to an earlier launch that has ended; "
                "exiting."
            )
        return plan


_BEFORE_LAUNCH = "#"


def claim_of(out: Path) -> Path:
    """Return the path of the file beside a trace that holds the id of the trace's launch."""
    return out.parent / f"{out.name}.launch"
