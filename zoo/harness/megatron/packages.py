"""Stand-ins for packages that wheels import unconditionally: old ones (0.8 and before), and triton since 0.18."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Refused(torch.nn.Module):
    """A layer of TransformerEngine: wheels derive classes from it, and we build none of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} needs TransformerEngine; args {args}, {kwargs}")


class LayerNorm(torch.nn.LayerNorm):
    """TransformerEngine's, which blocks before 0.8 use behind their last layer."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, sequence_parallel: bool = False, **kwargs: Any) -> None:
        assert not kwargs.get("zero_centered_gamma")
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            setattr(parameter, "sequence_parallel", sequence_parallel)  # noqa: B010  # torch's type knows no such one


class FusedAdam(torch.optim.AdamW):
    """apex's FusedAdam, which is AdamW by default."""

    def __init__(self, params: Any, **settings: Any) -> None:
        assert settings.pop("adam_w_mode", True)
        super().__init__(params, **settings)


def transformer_engine() -> dict[str, Any]:
    names = ("RMSNorm", "Linear", "LayerNormLinear", "DotProductAttention")
    return {"LayerNorm": LayerNorm} | {name: type(name, (Refused,), {}) for name in names}


def triton() -> dict[str, Any]:
    """Decorators under which a kernel can be declared; it cannot run, and to a version this old Megatron sends none."""

    def declare(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda kernel: kernel

    return {"__version__": "3.0.0", "jit": lambda kernel: kernel, "autotune": declare, "Config": declare}


def triton_language() -> dict[str, Any]:
    return dict.fromkeys(("constexpr", "int32", "int64", "float32"), int)


def norm_of_all(chunk: int, overflow: Any, lists: list[list[torch.Tensor]], per_tensor: bool) -> tuple[Any, None]:  # noqa: ARG001
    """`amp_C.multi_tensor_l2norm`."""
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm().view(1), None


def scale_all(chunk: int, overflow: Any, lists: list[list[torch.Tensor]], factor: float) -> None:  # noqa: ARG001
    """`amp_C.multi_tensor_scale`."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


def apply_to_all(operation: Callable[..., Any], overflow: Any, lists: Any, *args: Any) -> Any:
    """`apex.multi_tensor_apply.multi_tensor_applier`."""
    return operation(65536, overflow, lists, *args)


def version(whole: Callable[[str], str]) -> Callable[[str], str]:
    """The version that every branch for a newer TransformerEngine is newer than."""
    return lambda name: "0.12.0" if name == "transformer-engine" else whole(name)
