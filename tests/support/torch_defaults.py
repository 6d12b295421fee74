"""A script's own default dtype and device while a test runs, for TTrace's code alone.

What the test itself makes, and the model it trains, stays as torch has it without them: else half of the tests would
compare numbers of another dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import ttrace
from ttrace.automatic import data_sources

SOURCES = str(Path(ttrace.__file__).parent)
_PASSES_ON = data_sources.__file__
"""It makes what a script asks for."""
_OF_FLOATS = {torch.empty, torch.empty_strided, torch.eye, torch.linspace, torch.logspace, torch.ones, torch.rand}
_OF_FLOATS |= {torch.randn, torch.zeros}
_LIKE_THEIR_ARGUMENT = {torch.arange, torch.full, torch.scalar_tensor, torch.tensor}
_OF_INTEGERS = {torch.randint, torch.randperm}


@contextmanager
def use_defaults(dtype: torch.dtype | None, device: str | None) -> Iterator[None]:
    """Set both, and give what others than TTrace make torch's own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    torch.set_default_device(device)
    try:
        with _OwnDefaults(before):
            yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


class _OwnDefaults(TorchFunctionMode):
    """Gives a dtype and the CPU to new tensors of everybody but TTrace."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        is_ours = caller.startswith(SOURCES) and caller != _PASSES_ON
        if is_ours or func not in _OF_FLOATS | _LIKE_THEIR_ARGUMENT | _OF_INTEGERS:
            return func(*args, **kwargs or {})
        stated = {name: value for name, value in (kwargs or {}).items() if value is not None}
        device, floats = {"device": "cpu"}, {"dtype": self._dtype}
        if func in _OF_FLOATS:
            return func(*args, **device | floats | stated)
        made = func(*args, **device | stated)
        if func in _OF_INTEGERS:
            return made
        is_default = "dtype" not in stated and made.dtype == torch.get_default_dtype()
        return func(*args, **device | floats | stated) if is_default else made
