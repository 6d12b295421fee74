"""Readers of checkpoints: safetensors, torch.distributed.checkpoint, and files of torch.save."""

from __future__ import annotations

import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ttrace.errors import TTraceError
from ttrace.trace.format import DTYPES


@dataclass(frozen=True)
class TensorInfo:
    """What is known about a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint(ABC):
    """Tensors by name, each read on demand, and other values."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    values: Mapping[str, object]
    """Everything that is not a tensor, such as numbers and texts."""

    def read(self, name: str) -> torch.Tensor:
        """Read one whole tensor."""
        with _refuse_damage(self.path, f": {name}"):
            return self._read(name)

    @abstractmethod
    def _read(self, name: str) -> torch.Tensor: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a file or folder of any supported format."""
    if not path.exists():
        raise TTraceError(f"There is no checkpoint at {path}.")
    with _refuse_damage(path):
        if path.is_file():
            kind = SafetensorsCheckpoint if path.suffix == ".safetensors" else TorchCheckpoint
            return kind(path, [path])
        if (path / ".metadata").exists():
            return DistributedCheckpoint(path)
        if files := sorted(path.glob("*.safetensors")):
            return SafetensorsCheckpoint(path, files)
        if files := sorted(file for ending in ("bin", "pt", "pth") for file in path.glob(f"*.{ending}")):
            return TorchCheckpoint(path, files)
    raise TTraceError(
        f"{path} is not a known checkpoint format: it has neither .metadata (torch.distributed.checkpoint) nor files "
        "that end with .safetensors, .bin, .pt or .pth."
    )


class SafetensorsCheckpoint(Checkpoint):
    """One safetensors file, or all such files of a folder."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise TTraceError(f"{path} needs safetensors: pip install safetensors ({error}).") from error
        self.path, self.values = path, {}
        self._files: dict[str, Any] = {}
        tensors = {}
        for file in files:
            opened: Any = safe_open(str(file), framework="pt")
            for name in opened.keys():  # noqa: SIM118  # it is not a mapping
                part = opened.get_slice(name)
                self._files[name] = opened
                tensors[name] = TensorInfo(tuple(part.get_shape()), DTYPES[part.get_dtype()])
        self.tensors = tensors

    def _read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


class TorchCheckpoint(Checkpoint):
    """Files of torch.save, read without running code in them, and mapped so that only accessed tensors are read."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.path = path
        self._loaded: dict[str, torch.Tensor] = {}
        values: dict[str, object] = {}
        for file in files:
            for name, leaf in _flatten(_load(file)):
                if isinstance(leaf, torch.Tensor):
                    self._loaded[name] = leaf
                else:
                    values[name] = leaf
        self.values = values
        self.tensors = {name: TensorInfo(tuple(leaf.shape), leaf.dtype) for name, leaf in self._loaded.items()}

    def _read(self, name: str) -> torch.Tensor:
        return self._loaded[name].detach()


class DistributedCheckpoint(Checkpoint):
    """A folder that torch.distributed.checkpoint wrote, on any number of ranks.

    Its index and its values are pickles, so reading it can run code that the author of the file put there.
    """

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.path = path
        self._reader = _make_reader(path)
        known = self._reader.read_metadata().state_dict_metadata
        self.tensors = {
            name: TensorInfo(tuple(entry.size), entry.properties.dtype)
            for name, entry in known.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        others = [name for name in known if name not in self.tensors]
        self.values = dict(self._load({name: io.BytesIO() for name in others})) if others else {}

    def _read(self, name: str) -> torch.Tensor:
        info = self.tensors[name]
        loaded: torch.Tensor = self._load({name: torch.empty(info.shape, dtype=info.dtype, device="cpu")})[name]
        return loaded

    def _load(self, wanted: dict[str, Any]) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about the missing process group
            load(wanted, storage_reader=self._reader, no_dist=True)
        return wanted


@contextmanager
def _refuse_damage(path: Path, where: str = "") -> Iterator[None]:
    """Raise TTraceError for any error in this block: damaged or missing files lead to errors of many types."""
    try:
        yield
    except (TTraceError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # torch.distributed.checkpoint's error is not an Exception
        lines = str(error).strip().splitlines()
        raise TTraceError(
            f"{path} cannot be read as a checkpoint{where}: {type(error).__name__}: {lines[-1] if lines else ''}"
        ) from error


def _make_reader(path: Path) -> Any:
    """Make a reader that reads its index once. Reading it for each tensor would take minutes."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return index

    index = FileSystemReader(path).read_metadata()
    return Reader(path)


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(file, map_location="cpu", weights_only=True)  # a file of the old format


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested dicts and lists, with their keys joined by dots."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, (Mapping, torch.Tensor, list)) for inner in value):
        for number, inner in enumerate(value):
            yield from _flatten(inner, f"{name}.{number}" if name else str(number))
    else:
        yield name, value
