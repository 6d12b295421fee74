"""Frameworks that keep parameters in a form that no adapter here can read: they are refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ttrace.adapters.adapter import Optimizer, list_optimizers
from ttrace.adapters.deepspeed.compat import is_engine
from ttrace.errors import CaptureError


def refuse_unknown(chunks: Sequence[nn.Module], optimizer: Optimizer | None) -> None:
    """Raise an error that names the first part of a framework which would be judged wrongly."""
    found = next(_find_unknown(chunks, optimizer), None)
    if found is not None:
        what, advice = found
        raise CaptureError(f"TTrace cannot read the parameters of {what}. {advice}")


_ENGINE = "Give ttrace.attach the engine that deepspeed.initialize returns."
_ADAPTER = "Check the script without it, or write an adapter (docs/howto/adapter.md)."


def _find_unknown(chunks: Sequence[nn.Module], optimizer: Optimizer | None) -> Iterator[tuple[str, str]]:
    modules = [module for chunk in chunks for module in chunk.modules()]
    kinds = {_name_kind(each) for each in (*modules, *list_optimizers(optimizer))}
    has_engine = any(map(is_engine, chunks))
    if not has_engine and any(kind.startswith("deepspeed.") for kind in kinds):
        yield "DeepSpeed without its engine", _ENGINE
    if "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel" in kinds:
        yield "FSDP1 (FullyShardedDataParallel), which flattens them", "Use FSDP2 (fully_shard), which TTrace knows."
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not has_engine and hasattr(parameter, "ds_id"):
                yield f"DeepSpeed's ZeRO-3 without its engine ({name} has a ds_id, and is empty between uses)", _ENGINE
            if type(parameter).__name__ == "FlatParameter":
                yield f"a wrapper that flattens them ({name} is a FlatParameter)", _ADAPTER


def _name_kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
