"""What torchtitan needs where there is no accelerator: import this before it.

It takes a GPU for granted: in compiled attention, in the times and memory that it logs, in its choice of a device. And
gloo cannot divide while it sums, which FSDP2 asks for once its factor is set.
"""

import sys
import types
from typing import Any

import torch
import torch._inductor.compile_fx  # before there is a module that looks like triton
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import flex_attention


class Absent(types.ModuleType):
    """A module that can be imported and decorate functions, and no more."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(name)

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else lambda function: function

    def __or__(self, other: object) -> Any:
        return self

    __ror__ = __or__


for absent in ("triton", "triton.language"):
    sys.modules.setdefault(absent, Absent(absent))
sys.modules.setdefault("torch.utils.tensorboard", Absent("torch.utils.tensorboard"))
torch._utils._get_available_device_type = lambda: "cpu"
flex_attention._validate_device = lambda *_: None

barrier, set_factor = dist.barrier, FSDPModule.set_gradient_divide_factor


def wait_without_devices(*args: Any, **kwargs: Any) -> Any:
    kwargs.pop("device_ids", None)
    return barrier(*args, **kwargs)


def set_factor_and_sum(module: FSDPModule, factor: float) -> None:
    set_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


dist.barrier = wait_without_devices
FSDPModule.set_gradient_divide_factor = set_factor_and_sum

from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402


class Memory:
    """What is logged of a device's memory."""

    device_name, device_capacity = "cpu", 1

    def get_peak_stats(self) -> Any:
        fields = ("max_active_gib", "max_active_pct", "max_reserved_gib", "max_reserved_pct")
        return types.SimpleNamespace(**dict.fromkeys((*fields, "num_alloc_retries", "num_ooms"), 0))

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = Memory
utils.set_pg_timeouts = lambda *_, **__: None
FlexAttention._compiled_flex_attn = staticmethod(flex_attention.flex_attention)
