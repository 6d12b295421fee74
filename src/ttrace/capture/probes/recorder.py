"""Probe that writes tensors to the trace, in full or as sketches."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch

from ttrace.capture.plan import Plan
from ttrace.capture.probes.probe import Visit
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.compat import torch as torch_compat
from ttrace.layouts.ids import Kind, Site, TensorId
from ttrace.layouts.region import Region
from ttrace.trace.background_writer import BackgroundWriter
from ttrace.trace.format import End, Manifest, Record, SketchInfo
from ttrace.trace.tensor_bytes import DEVICE_ERRORS, Change, is_asynchronous
from ttrace.trace.twin_stats import Counterpart
from ttrace.trace.writer import Writer
from ttrace.values.sketch import compute_sketch

Local = Callable[[torch.Tensor, Site], torch.Tensor]

_NUM_SAMPLES = 1 << 12
"""Number of elements from which a tensor's mean is estimated: the error is 1/64 of the standard deviation."""
_HELD_KINDS = (Kind.PARAM, Kind.PARAM_AFTER, Kind.OPTIM, Kind.BUFFER, Kind.BUFFER_AFTER)
"""Kinds that change only between steps."""


def open_writer(plan: Plan, manifest: Manifest) -> Writer:
    """Open the writer of a rank's trace, as the plan says."""
    counterpart = Counterpart.find(plan.measured, manifest.rank, plan.keeps_full)
    if counterpart is not None:
        manifest = manifest.model_copy(update={"measured": counterpart.launch})
    return Writer(plan.written, manifest, max_bytes_held=plan.max_bytes_held, claim=plan.claim, counterpart=counterpart)


class Recorder:
    """Probe that writes every visit the plan wants, once per id and microbatch. Gradients may come in other threads."""

    def __init__(self, writer: Writer, plan: Plan, detail: Detail, local: Local) -> None:
        self._writer: Writer | BackgroundWriter = writer
        self._append_collective = writer.write_collective
        self._plan = plan
        self._detail = detail
        self._local = local
        self._lock = threading.Lock()
        self._seen: dict[int, set[tuple[TensorId, int, Region | None]]] = {}
        """By step, what was recorded. Only the last two steps are kept, because a run may have very many."""
        self._problems: dict[str, None] = {}
        self._process = os.getpid()

    @property
    def _is_fork(self) -> bool:
        """Whether this is a fork of the traced process: it has the same files open, and must write nothing."""
        return os.getpid() != self._process

    def write_collective(self, line: str) -> None:
        """Append a collective to the ledger, as it was encoded."""
        if not self._is_fork:
            self._append_collective(line)

    def visit(self, visit: Visit) -> None:
        if self._is_fork or not self._plan.wants(visit.id.site):
            return
        try:
            local = self._read_local(visit)
            is_plain = type(local) is torch.Tensor
            with torch_compat.without_dispatch_modes() if is_plain else nullcontext():
                record, stored, mean = self._make_record(visit, local)
                with self._lock:
                    if not self._is_first(visit, record):
                        return
                    if visit.is_generated:
                        self._writer.write_generated(record)
                        return
                    if is_asynchronous(stored) and isinstance(self._writer, Writer):
                        self._writer = BackgroundWriter(self._writer, self.add_problem)
                    kind_change = Change.LATER if visit.id.kind in _HELD_KINDS else Change.SOON
                    self._writer.write(record, stored, mean, Change.NEVER if record.sketch else kind_change)
        except DEVICE_ERRORS:  # a kernel of the training script failed, which torch raises late
            raise
        except Exception as error:  # a recording failure never breaks the training step: it is kept for the end
            self.add_problem(f"{visit.id} could not be recorded: {type(error).__name__}: {error}")

    def add_problem(self, problem: str) -> None:
        """Add a problem, which is reported at the end of the trace."""
        self._problems[problem] = None

    def flush(self) -> None:
        """Pass all records so far to the operating system, because the process may end at any time."""
        if self._is_fork:
            return
        with self._lock:
            self._writer.flush()

    def close(self, end: End) -> None:
        """Complete the trace; the problems kept so far are added to its end."""
        if not self._is_fork:
            self._writer.close(end.model_copy(update={"problems": (*end.problems, *self._problems)}))

    def _read_local(self, visit: Visit) -> torch.Tensor:
        """Return the part of a tensor that this rank holds."""
        if type(visit.tensor) is torch.Tensor:
            local = self._local(visit.tensor.detach(), visit.id.site)
        else:
            with torch.no_grad():  # not a detached DTensor: since torch 2.14 that may communicate, and use up a mask
                local = self._local(visit.tensor, visit.id.site).detach()
        return local

    def _make_record(self, visit: Visit, local: torch.Tensor) -> tuple[Record, torch.Tensor, torch.Tensor | None]:
        """Make the record of a tensor; return it, what is stored, and a mean that the device has not computed yet."""
        placement = visit.placement
        if placement is not None and tuple(local.shape) != placement.region.local_shape:
            # Only padding can differ here: placement.region was made for this shape.
            local = local[tuple(slice(size) for size in placement.region.local_shape)]
        stored, sketch, mean = self._choose_stored(visit, local)
        record = Record(
            id=visit.id,
            shape=tuple(local.shape),
            dtype=local.dtype,
            region=placement.region if placement else None,
            pending=placement.pending if placement else (),
            layout=placement.layout if placement else "",
            by=placement.by if placement else None,
            microbatch=visit.microbatch,
            values=visit.values,
            sketch=sketch,
            time=max(0, time.time_ns() // 1000),  # a clock may be set to before 1970
        )
        return record, stored, mean

    def _is_first(self, visit: Visit, record: Record) -> bool:
        """Whether this tensor is not recorded yet; from now on it is."""
        # Gradients of streamed parameters may come in parts.
        may_be_part = visit.is_part or visit.id.kind is Kind.PARAM_GRAD
        key = (visit.id, visit.microbatch, record.region if may_be_part else None)
        seen = self._find_seen(visit.id.step)
        if key in seen:
            return False
        seen.add(key)
        return True

    def _find_seen(self, step: int) -> set[tuple[TensorId, int, Region | None]]:
        if step not in self._seen:
            for old in [each for each in self._seen if each < step - 1]:
                del self._seen[old]
        return self._seen.setdefault(step, set())

    def _choose_stored(
        self, visit: Visit, local: torch.Tensor
    ) -> tuple[torch.Tensor, SketchInfo | None, torch.Tensor | None]:
        """Return what is written of a tensor: itself, or its sketch if the plan wants one and it is smaller.

        The mean of what is sketched comes with it where isolation will generate values with this mean.
        """
        plan, placement = self._plan, visit.placement
        if visit.is_generated:
            return local, None, None
        is_less = local.numel() * local.dtype.itemsize > plan.num_buckets * torch.float64.itemsize
        if placement is None or not is_less or not local.is_floating_point():
            return local, None, None
        if visit.id.kind is Kind.INPUT and not visit.tensor.requires_grad:
            return local, None, None  # isolation replays this input
        if not self._detail.is_sketched(visit.id, local):
            return local, None, None
        sketch = compute_sketch(local, placement.region, plan.num_buckets)
        needs_mean = plan.role == "reference" and visit.id.kind in (Kind.INPUT, Kind.GRAD_OUTPUT)
        if not needs_mean:
            return sketch, SketchInfo(plan.num_buckets), None
        mean = _estimate_mean(local)
        if is_asynchronous(mean):
            return sketch, SketchInfo(plan.num_buckets), mean
        return sketch, SketchInfo(plan.num_buckets).with_mean(float(mean)), None


def _estimate_mean(tensor: torch.Tensor) -> torch.Tensor:
    """Estimate the mean from some elements, at an odd distance, so that they are not all from a few columns."""
    if tensor.is_contiguous():
        tensor = tensor.view(-1)[:: tensor.numel() // _NUM_SAMPLES | 1]
    return tensor.mean(dtype=torch.float32)


_NUM_SIDES = 2
"""Reference and candidate are stored; twins are not."""
_PER_PARAMETER = 5
"""What is recorded of a parameter in a step: before, after, the gradient, and an optimizer's two moments."""


class Detail:
    """Chooses what is recorded in full, as the plan says, and what as a sketch.

    The reference chooses, and every run that follows it does the same with each id. The space that the model's
    parameters take is known before the first step. Activations are recorded in full as long as there is space left.
    """

    def __init__(
        self, plan: Plan, reference: ReferenceTrace, parameters: Iterable[torch.Tensor], num_ranks: int
    ) -> None:
        self._plan = plan
        self._reference = reference
        share = plan.budget // _NUM_SIDES // num_ranks
        needed = plan.num_steps * _PER_PARAMETER * sum(parameter.nbytes for parameter in parameters)
        self._sketches_parameters = needed > share
        self._left = share if self._sketches_parameters else share - needed

    @property
    def may_sketch(self) -> bool:
        """Whether this run's layouts must be known while it runs, because sketches need them."""
        plan = self._plan
        return plan.record == "sketch" or (plan.record == "auto" and self._reference.has_sketches)

    def is_sketched(self, tensor_id: TensorId, local: torch.Tensor) -> bool:
        """Whether a sketch is enough; what other runs replay from the reference is recorded in full."""
        plan, kind = self._plan, tensor_id.kind
        if plan.record == "full" or kind in (Kind.BATCH, Kind.DECISION) or plan.keeps_full(tensor_id.site):
            return False
        if plan.record == "sketch":
            return True
        if plan.reference is not None:
            record = self._reference.record(tensor_id)
            return record is not None and record.sketch is not None
        if kind.is_of_param:
            return self._sketches_parameters
        if local.nbytes > self._left:
            return True
        self._left -= local.nbytes
        return False
