"""The ledger: every collective of a rank, with its tensors' form, its module, and its line of code.

No tensor is copied or read.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ttrace.adapters.adapter import Adapter
from ttrace.capture.environment import TORCH, is_of_script
from ttrace.capture.observe.events import StepCounter
from ttrace.capture.observe.function_calls import FunctionCalls
from ttrace.capture.plan import Plan
from ttrace.capture.process import offer_stack
from ttrace.compat import distributed as distributed_compat
from ttrace.compat import torch as torch_compat
from ttrace.layouts.ids import Phase
from ttrace.layouts.mesh import Mesh
from ttrace.trace.collectives import Collective, Group, Moment, encode_at, encode_form
from ttrace.trace.format import rank_folder

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
    """A collective that was not waited for yet, with its buffers and the version of each when it was issued."""

    collective: Collective
    buffers: Sequence[tuple[weakref.ref[torch.Tensor], int]]


class Ledger:
    """Writes each collective of a candidate's rank when it is issued. A failure becomes a note; the step goes on."""

    def __init__(
        self,
        plan: Plan,
        adapter: Adapter,
        clock: StepCounter,
        modules: Iterable[tuple[str, nn.Module]],
        append: Callable[[str], None],
        calls: FunctionCalls | None = None,
    ) -> None:
        self._mesh = adapter.mesh
        self._rank = adapter.coord.rank
        self._clock = clock
        self._is_kept = plan.role == "candidate" and adapter.mesh.num_ranks > 1
        self._spans = ModuleSpans(modules if self._is_kept else ())
        self._append = append
        self._calls = calls
        # Ranks hang in collectives, so a rank that has a ledger can also show its stack.
        self._end_offer = offer_stack(plan.out / rank_folder(self._rank)) if self._is_kept else lambda: None
        self._forms: dict[tuple[Any, ...], tuple[Collective, str]] = {}
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
        """Write a collective and run it: `name` is its name, `arguments` are its operator's, `run` runs it."""
        entered = self._enter(name, arguments) if self._is_kept else None
        result = run()
        if entered is not None and entered.is_async and not entered.issuer:
            self._watch_buffers(entered, arguments, result)
        return result

    def _enter(self, name: str, arguments: Mapping[str, Any]) -> Collective | None:
        """Write a line, and return the collective, but with the order and time of the first one like it."""
        try:
            one, text = self._find_form(name, arguments)
            moment = Moment(self._num, self._clock.step, self._clock.microbatch, max(0, time.time_ns() // 1000))
            self._append(encode_at(moment, text))
        except Exception as error:
            self.notes[f"the ledger lacks a collective ({name}): {type(error).__name__}: {error}"] = None
            return None
        if self._calls is not None:
            source = "" if one.issuer else one.source  # a library's reduction is not what the script does
            self._calls.on_collective(name, source, self._num, list(_flatten(list(arguments.values()))))
        self._num += 1
        return one

    def _watch_buffers(self, one: Collective, arguments: Mapping[str, Any], result: Any) -> None:
        """Remember the versions of a collective's buffers until it is waited for; each write counts one up."""
        tensors = [tensor for tensor in _flatten(list(arguments.values())) if _is_alone(tensor)]
        work = distributed_compat.find_work(result) if tensors else None
        if work is not None:
            buffers = [(weakref.ref(tensor), torch_compat.read_version(tensor)) for tensor in tensors]
            self._pending[work] = _Pending(one, buffers)

    def on_wait(self, work: Any) -> None:
        """Note a buffer that was written after its collective was issued: the result is a mix of old and new values."""
        pending = self._pending.pop(work, None)
        if pending is None:
            return
        for buffer, version in pending.buffers:
            tensor = buffer()
            if tensor is not None and torch_compat.read_version(tensor) != version:
                one = pending.collective
                where = f" in {one.module}" if one.module else ""
                self.notes[f"the buffer of {one}{where} ({one.source}) was written before it was waited for"] = None

    def _find_form(self, name: str, arguments: Mapping[str, Any]) -> tuple[Collective, str]:
        """Find what a line says besides its moment. It is cached: most collectives of a step are like earlier ones."""
        group = distributed_compat.read_group(arguments["process_group"])
        tensors = _list_contributions(arguments)
        first = tensors[0] if tensors else None
        source, inner = _find_caller()
        boxed = arguments.get("reduce_op")
        known = (
            name,
            group.group_name,
            self._find_phase(),
            "" if boxed is None else distributed_compat.read_reduction(boxed, inner),
            next((arguments[key] for key in ("root_rank", "src", "dst") if key in arguments), None),
            None if first is None else (first.shape, first.dtype),
            len(tensors),
            sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            bool(arguments.get("async_op", True)),
            source,
            _find_issuer(inner),
        )
        if known not in self._forms:
            one = self._describe(group, *known)
            self._forms[known] = one, encode_form(one)
        return self._forms[known]

    def _describe(
        self,
        process_group: Any,
        name: str,
        _group_name: str,
        where: tuple[Phase, str],
        reduction: str,
        peer: int | None,
        first: tuple[torch.Size, torch.dtype] | None,
        num_tensors: int,
        num_bytes: int,
        is_async: bool,
        source: str,
        issuer: str,
    ) -> Collective:
        group, ranks = self._find_group(process_group)
        return Collective(
            order=0,
            step=0,
            microbatch=0,
            module=where[1],
            phase=where[0],
            op=name,
            reduction=reduction,
            group=group,
            peer=None if peer is None else ranks[peer],
            shape=() if first is None else tuple(first[0]),
            dtype="" if first is None else str(first[1]).removeprefix("torch."),
            num_tensors=num_tensors,
            num_bytes=num_bytes,
            is_async=is_async,
            source=source,
            issuer=issuer,
            begin=0,
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
        """Describe a process group by mesh axes, if some axes give its ranks; return its ranks as well."""
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(process_group))
        axes = _find_axes(self._mesh, self._rank, ranks)
        return (Group(axes=axes) if axes else Group(ranks=ranks)), ranks


def _find_axes(mesh: Mesh, rank: int, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Find the fewest mesh axes whose ranks these are; none if no axes give them."""
    if len(ranks) == 1 or rank >= mesh.num_ranks:
        return ()
    for part in mesh.factorisations:
        axes = [axis for axis, size in part if size > 1]
        for chosen in itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(1, len(axes) + 1)):
            if Group(axes=chosen).list_ranks(mesh, rank) == tuple(sorted(ranks)):
                return chosen
    return ()


def _list_contributions(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """List what a rank contributes; if nothing, as for all but one rank in a scatter, list what it receives."""
    value = next((arguments[name] for name in _CONTRIBUTIONS if name in arguments), None)
    return list(_flatten(value)) or list(_flatten(list(arguments.values())))


def _flatten(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _flatten(each)


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its memory to itself: the views of one buffer share a version."""
    return not torch_compat.is_view(tensor) and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def _find_caller() -> tuple[str, list[FrameType]]:
    """Find the file and line of the code that communicates, and torch's own frames between it and here."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != distributed_compat.__file__:
        frame = frame.f_back  # TTrace's own frames, which observe the collective
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
    """Find the part of torch that communicates by itself; DDP does so from C++, in a backward pass."""
    files = [frame.f_code.co_filename for frame in inner]
    issuer = next(filter(None, map(_name_issuer, files)), "")
    if issuer:
        return issuer
    first = next((path for path in files if not path.startswith(_PLUMBING)), "")
    return "DDP" if first.startswith(_AUTOGRAD) else ""


_PLUMBING = (f"{TORCH}_ops.py", f"{TORCH}library.py")
"""Files of torch that only pass a call on to an operator."""
_AUTOGRAD = f"{TORCH}autograd"


@cache
def _name_issuer(path: str) -> str:
    part = path[len(TORCH) :]
    return next((issuer for folder, issuer in _ISSUERS.items() if part.startswith(folder)), "")


@dataclass(frozen=True, slots=True)
class _OpenCall:
    module: nn.Module
    name: str
    first_node: int
    is_recompute: bool


class ModuleSpans:
    """Observer of which module runs, and which module's forward made an autograd node, until `remove`.

    Unlike `hooks.py`, which sees what a module's own forward takes and returns, it counts what other hooks of a module
    do as part of that module: DTensor and FSDP2 communicate there.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._open: list[_OpenCall] = []
        self._spans: list[tuple[int, int, str]] = []
        self._handles: list[RemovableHandle] = []
        for name, module in modules:
            self._handles += [
                module.register_forward_pre_hook(partial(self._begin, name), prepend=True),
                module.register_forward_hook(self._end),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_step(self) -> None:
        """Forget all calls of earlier steps."""
        self._open.clear()
        self._spans.clear()

    def find_running(self) -> str:
        """Find the innermost module that runs, in a forward or a recomputation; empty if there is none."""
        # A recomputation stops early, with an exception, and leaves its calls open.
        is_recompute = torch_compat.is_in_backward()
        return self._open[-1].name if self._open and self._open[-1].is_recompute == is_recompute else ""

    def find_maker(self, node_number: int) -> str:
        """Find the innermost module whose forward made the autograd node of this number; empty if none did.

        Calls are listed as they ended, the inner ones first, so that their last nodes are in order.
        """
        begin = bisect.bisect_right(self._spans, node_number, key=itemgetter(1))
        later = itertools.islice(self._spans, begin, None)
        return next((name for first, _, name in later if first <= node_number), "")

    def _begin(self, name: str, module: nn.Module, _args: Any) -> None:
        number, is_recompute = torch_compat.read_sequence_nr(), torch_compat.is_in_backward()
        self._open.append(_OpenCall(module, name, number, is_recompute))

    def _end(self, module: nn.Module, _args: Any, _output: Any) -> None:
        while self._open:
            call = self._open.pop()
            if call.module is module:
                self._spans.append((call.first_node, torch_compat.read_sequence_nr(), call.name))
                return
