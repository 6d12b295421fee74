"""Builds the extension once for each version of its sources and of torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

_SOURCES = Path(__file__).parent / "csrc"
_NAME = "emu_c"
_FLAGS = ["-O1", "-g0"]


def build() -> Any:
    """Return the extension; processes that need it at the same time wait for the first one, which builds it."""
    files = sorted(_SOURCES.iterdir())
    digest = hashlib.sha256(f"{torch.__version__} {_FLAGS}".encode())
    for file in files:
        digest.update(file.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ttrace" / "emulator"
    folder = cache / digest.hexdigest()[:16]
    is_built = folder / "built"
    if not is_built.exists():
        from torch.utils import cpp_extension

        folder.mkdir(parents=True, exist_ok=True)
        sources = [str(file) for file in files if file.suffix == ".cpp"]
        cpp_extension.load(_NAME, sources, build_directory=str(folder), extra_cflags=_FLAGS)
        is_built.touch()
    spec = importlib.util.spec_from_file_location(_NAME, folder / f"{_NAME}.so")
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension
