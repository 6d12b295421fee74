"""The ledger: who communicated what, in which module, and from which line of code. No tensor is copied or read."""

from __future__ import annotations

import inspect
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from ttrace import distributed_compat, torch_compat
from ttrace.adapters.adapter import Adapter
from ttrace.capture.observe.function_calls import FunctionCalls
from ttrace.capture.observe.module_spans import ModuleSpans
from ttrace.capture.observe.step_counter import StepCounter
from ttrace.capture.plan import Plan
from ttrace.capture.script_files import TORCH, is_of_script
from ttrace.capture.stacks import offer_stack
from ttrace.tensors.mesh import Mesh
from ttrace.trace.format import rank_folder
from ttrace.trace.lines.collectives import Collective, Group, Phase

_CONTRIBUTIONS = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")
"""The names of the argument that has what a rank contributes, the one that decides first."""
_ISSUERS = {
    "distributed/fsdp/": "FSDP2",
    "distributed/pipelining/": "pipelining",
    "distributed/tensor/": "DTensor",
    "nn/parallel/": "DDP",
    "distributed/optim/": "torch's optimizer",
}
"""Parts of torch that communicate by themselves, by the folder of their files."""


@dataclass(frozen=True)
class _Pending:
    """A collective that was not waited for yet, with its buffers and how often each was written before."""

    collective: Collective
    buffers: Sequence[tuple[weakref.ref[torch.Tensor], int]]


class Ledger:
    """Writes each collective of a candidate's rank as it is issued. A failure becomes a note, and ends no step."""

    def __init__(
        self,
        plan: Plan,
        adapter: Adapter,
        clock: StepCounter,
        modules: Iterable[tuple[str, nn.Module]],
        append: Callable[[Collective], None],
        calls: FunctionCalls | None = None,
    ) -> None:
        self._mesh = adapter.mesh
        self._rank = adapter.coord.rank
        self._clock = clock
        self._is_kept = plan.role == "candidate" and adapter.mesh.num_ranks > 1
        self._spans = ModuleSpans(modules if self._is_kept else ())
        self._append = append
        self._calls = calls
        # A collective is where ranks hang.
        self._end_offer = offer_stack(plan.out / rank_folder(self._rank)) if self._is_kept else lambda: None
        self._groups: dict[str, tuple[Group, tuple[int, ...]]] = {}
        self._num = 0
        self._pending: dict[Any, _Pending] = {}
        self.notes: dict[str, None] = {}

    def remove(self) -> None:
        """Remove the hooks, and the offer of a stack."""
        self._spans.remove()
        self._end_offer()

    def begin_step(self) -> None:
        """Forget the calls of earlier steps."""
        self._spans.begin_step()
        self._pending.clear()

    def observe(self, name: str, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Enter a collective, and run it: its name, the arguments of its operator by name, and what runs it."""
        entered = self._enter(name, arguments) if self._is_kept else None
        result = run()
        if entered is not None and entered.is_async and not entered.issuer:
            self._watch_buffers(entered, arguments, result)
        return result

    def _enter(self, name: str, arguments: Mapping[str, Any]) -> Collective | None:
        try:
            one = self._describe(name, arguments)
            self._append(one)
        except Exception as error:
            self.notes[f"the ledger lacks a collective ({name}): {type(error).__name__}: {error}"] = None
            return None
        self._num += 1
        if self._calls is not None:
            self._calls.on_collective(one.order, list(_flatten(list(arguments.values()))))
        return one

    def _watch_buffers(self, one: Collective, arguments: Mapping[str, Any], result: Any) -> None:
        """Remember how often the buffers of a collective were written so far, until it is waited for."""
        tensors = [tensor for tensor in _flatten(list(arguments.values())) if _is_alone(tensor)]
        work = distributed_compat.find_work(result) if tensors else None
        if work is not None:
            buffers = [(weakref.ref(tensor), torch_compat.read_version(tensor)) for tensor in tensors]
            self._pending[work] = _Pending(one, buffers)

    def on_wait(self, work: Any) -> None:
        """Note a buffer that was written since its collective was issued: what arrives is neither old nor new."""
        pending = self._pending.pop(work, None)
        if pending is None:
            return
        for buffer, version in pending.buffers:
            tensor = buffer()
            if tensor is not None and torch_compat.read_version(tensor) != version:
                one = pending.collective
                where = f" in {one.module}" if one.module else ""
                self.notes[f"the buffer of {one}{where} ({one.source}) was written before it was waited for"] = None

    def _describe(self, name: str, arguments: Mapping[str, Any]) -> Collective:
        group, ranks = self._find_group(distributed_compat.read_group(arguments["process_group"]))
        tensors = _list_contributions(arguments)
        source, inner = _find_caller()
        phase, module = self._find_phase()
        peer = next((arguments[key] for key in ("root_rank", "src", "dst") if key in arguments), None)
        boxed = arguments.get("reduce_op")
        return Collective(
            order=self._num,
            step=self._clock.step,
            microbatch=self._clock.microbatch,
            module=module,
            phase=phase,
            op=name,
            reduction="" if boxed is None else distributed_compat.read_reduction(boxed, inner),
            group=group,
            peer=None if peer is None else ranks[peer],
            shape=tuple(tensors[0].shape) if tensors else (),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            num_tensors=len(tensors),
            num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            is_async=bool(arguments.get("async_op", True)),
            source=source,
            issuer=_find_issuer(inner),
            begin=time.time_ns() // 1000,
        )

    def _find_phase(self) -> tuple[Phase, str]:
        """Find the part of the step that runs, and the innermost module in it."""
        running = self._spans.find_running()
        if torch_compat.is_in_backward():
            if running and torch.is_grad_enabled():
                return Phase.RECOMPUTE, running
            number = distributed_compat.read_current_node()
            return Phase.BACKWARD, "" if number is None else self._spans.find_maker(number)
        if running:
            return Phase.FORWARD, running
        return (Phase.OPTIMIZER if self._clock.is_in_update else Phase.OTHER), ""

    def _find_group(self, process_group: Any) -> tuple[Group, tuple[int, ...]]:
        """Describe a process group by mesh axes, if any give its ranks; return its ranks as well."""
        import torch.distributed as dist

        name = process_group.group_name
        if name not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(process_group))
            axes = _find_axes(self._mesh, self._rank, ranks)
            self._groups[name] = (Group(axes=axes) if axes else Group(ranks=ranks)), ranks
        return self._groups[name]


def _find_axes(mesh: Mesh, rank: int, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Find the fewest axes along which these ranks lie; none if no axes give them."""
    if len(ranks) == 1 or rank >= mesh.num_ranks:
        return ()
    for part in mesh.factorisations:
        axes = [axis for axis, size in part if size > 1]
        for chosen in itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(1, len(axes) + 1)):
            if Group(axes=chosen).list_ranks(mesh, rank) == tuple(sorted(ranks)):
                return chosen
    return ()


def _list_contributions(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    value = next((arguments[name] for name in _CONTRIBUTIONS if name in arguments), None)
    return list(_flatten(value))


def _flatten(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _flatten(each)


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory: views of one buffer count their writes together."""
    return not torch_compat.is_view(tensor) and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def _find_caller() -> tuple[str, list[FrameType]]:
    """Find the file and line of the code that communicates, and torch's own frames between it and here."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != distributed_compat.__file__:
        frame = frame.f_back  # those who tell of a collective
    inner: list[FrameType] = []
    while frame is not None:
        path = frame.f_code.co_filename
        if is_of_script(path):
            return f"{path}:{frame.f_lineno}", inner
        if path.startswith(TORCH):
            inner.append(frame)
        frame = frame.f_back
    return "", inner


def _find_issuer(inner: list[FrameType]) -> str:
    """Find the part of torch that communicates on its own account; DDP does so from C++, in a backward pass."""
    for frame in inner:
        path = frame.f_code.co_filename[len(TORCH) :]
        for folder, issuer in _ISSUERS.items():
            if path.startswith(folder):
                return issuer
    first = next((path for frame in inner if not _is_plumbing(path := frame.f_code.co_filename)), "")
    return "DDP" if first.startswith(f"{TORCH}autograd") else ""


def _is_plumbing(path: str) -> bool:
    """Whether a file of torch only passes a call on to an operator."""
    return path.startswith((f"{TORCH}_ops.py", f"{TORCH}library.py"))
