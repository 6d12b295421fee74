"""Models whose parameters have no values, and whose buffers do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ttrace.errors import CaptureError


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put each parameter on the meta device as soon as a module registers it; buffers keep their values."""
    known = WeakTensorKeyDictionary()  # a parameter that two modules share stays one parameter

    def move_to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:  # noqa: ARG001
        if parameter is None or parameter.is_meta:
            return None
        if parameter not in known:
            known[parameter] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            vars(known[parameter]).update(vars(parameter))
        on_meta: nn.Parameter = known[parameter]
        return on_meta

    handle = register_module_parameter_registration_hook(move_to_meta)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        handle.remove()


def check_buffers(model: nn.Module) -> None:
    """Refuse a model that was put on the meta device together with its buffers."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise CaptureError(
                f"buffer {name} is on the meta device and has no values. Have ttrace.streamed build the model, as in "
                "ttrace.streamed(lambda: Model(config)): it leaves buffers where they are."
            )
