"""Stand-ins for a GPU: streams that never wait, one random generator, kernels in torch.

Nothing here computes what Megatron computes: each function does what the replaced one does, on CPU tensors.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


class Stream:
    """Work on a CPU is done when the call returns: there is nothing to wait for."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    """Has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Generators:
    """The generator of every device is the one that CPU kernels draw from."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


class Nobody:
    """A class without instances."""


def no_float8(parameters: Sequence[torch.Tensor], *args: Any) -> None:  # noqa: ARG001
    """Quantize parameters to float8, of which there are none."""
    assert not parameters


def nothing(*args: Any, **kwargs: Any) -> None: ...


def itself(tensor: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    return tensor


def current_device() -> torch.device:
    return CPU


def current_stream(*args: Any, **kwargs: Any) -> Stream:  # noqa: ARG001
    return Stream()


def stream_context(stream: Any) -> Stream:
    return stream or Stream()


def rng_state(device: Any = None) -> torch.Tensor:  # noqa: ARG001
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:  # noqa: ARG001
    torch.default_generator.set_state(state)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def call_at_once(callback: Callable[[], None], **kwargs: Any) -> None:  # noqa: ARG001
    callback()


def uncompiled(function: Any = None, **kwargs: Any) -> Any:  # noqa: ARG001
    """What `torch.compile` is, with a function or as a decorator with settings."""
    return function or uncompiled


def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same factory, for which "cuda" is the CPU."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)  # memory that only a GPU reads
        return factory(*args, **kwargs)

    return made


def type_name(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Tensor.type` that gives Megatron, and no other caller, the name that the type has on a GPU."""

    def type_on_gpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = whole(tensor, *args, **kwargs)
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        if isinstance(name, str) and asks.startswith("megatron."):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    return type_on_gpu


def all_to_all_single(whole: Callable[..., Any]) -> Callable[..., Any]:
    """With sizes given as tensors, too: Megatron turns them into lists only where they lie on a GPU."""

    def exchanged(*args: Any, **kwargs: Any) -> Any:
        sizes = {name: _listed(value) for name, value in kwargs.items() if name.endswith("split_sizes")}
        return whole(*args, **kwargs | sizes)

    return exchanged


def all_gather(whole: Callable[..., Any]) -> Callable[..., Any]:
    """With parts of unequal sizes, too, as NCCL does it: one broadcast for each."""

    def gathered(tensor_list: list[Any], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if async_op or not _is_uneven(tensor_list):
            return whole(tensor_list, tensor, group, async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for source, part in enumerate(tensor_list):
            dist.broadcast(part, group=group, group_src=source)
        return None

    return gathered


def reduce_scatter(whole: Callable[..., Any]) -> Callable[..., Any]:
    """With parts of unequal sizes, too: one sum for each."""

    def scattered(
        output: torch.Tensor,
        input_list: list[Any],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or not _is_uneven(input_list):
            return whole(output, input_list, op, group, async_op)
        for owner, part in enumerate(input_list):
            total = part.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, op=op, group=group)
            if owner == dist.get_rank(group):
                output.copy_(total)
        return None

    return scattered


def counted(histc: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.histc` of whole numbers, for which the CPU has no kernel."""

    def count(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.is_floating_point():
            return histc(tensor, *args, **kwargs)
        return histc(tensor.double(), *args, **kwargs).to(tensor.dtype)

    return count


class LayerNormKernel:
    """What apex calls FusedLayerNormAffineFunction."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, shape: Any, eps: float, memory_efficient: bool = False
    ) -> None:
        """Never called: Megatron reads which arguments there are."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,  # noqa: ARG004
    ) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, tuple(shape), weight, bias, eps)


def grouped_product(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
    """What grouped_gemm calls gmm: so many rows of `a` times each matrix of `b`."""
    rows = a.split(sizes.tolist())
    return torch.cat([part @ (matrix.T if trans_b else matrix) for part, matrix in zip(rows, b, strict=True)])


def module(name: str, **contents: Any) -> types.ModuleType:
    """A module, found by every later import, with these contents; as a package, so that it may have parts."""
    made = types.ModuleType(name)
    made.__path__ = []
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    vars(made).update(contents)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, made)
    return made


def _listed(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _is_uneven(parts: Sequence[torch.Tensor]) -> bool:
    return len({part.shape for part in parts}) > 1
