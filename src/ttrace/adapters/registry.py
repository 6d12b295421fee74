"""Registry of adapters, which chooses the one for a model.

Other packages add adapters with an entry point in the group `ttrace.adapters`, whose object is a subclass of `Adapter`.
Frameworks that keep parameters in a form that no adapter can read are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points

from torch import nn

from ttrace.adapters.adapter import Adapter, Optimizer, list_optimizers
from ttrace.adapters.deepspeed.compat import is_engine
from ttrace.adapters.native.adapter import MeshLike, read_mesh
from ttrace.errors import CaptureError

GROUP = "ttrace.adapters"
BUILT_IN = (
    EntryPoint("deepspeed", "ttrace.adapters.deepspeed.adapter:DeepSpeed", GROUP),
    EntryPoint("megatron", "ttrace.adapters.megatron.adapter:Megatron", GROUP),
    EntryPoint("torchtitan", "ttrace.adapters.torchtitan.adapter:Torchtitan", GROUP),
    EntryPoint("transformers", "ttrace.adapters.transformers.adapter:Transformers", GROUP),
    EntryPoint("native", "ttrace.adapters.native.adapter:Native", GROUP),
)
"""The first adapter that recognises a model is chosen; `native` recognises every model."""

_ENGINE = "Give ttrace.attach the engine that deepspeed.initialize returns."
_ADAPTER = "Check the script without it, or write an adapter (docs/howto/adapter.md)."


def make_adapter(
    chosen: type[Adapter] | Adapter | None,
    chunks: Sequence[nn.Module],
    optimizer: Optimizer | None,
    mesh: MeshLike | None,
) -> Adapter:
    """Make the adapter for a model: the chosen one, or the first that recognises it."""
    if isinstance(chosen, Adapter):
        if mesh is not None:
            raise CaptureError("attach(adapter=..., mesh=...): this adapter already has a mesh. Leave mesh= out.")
        return chosen
    kind = find_adapter(chunks, optimizer) if chosen is None else chosen
    if not isinstance(kind, type) or not issubclass(kind, Adapter):
        raise CaptureError(
            f"attach(adapter={chosen!r}): give a subclass of ttrace.adapters.adapter.Adapter, or an instance of one."
        )
    return kind(chunks, optimizer, mesh=None if mesh is None else read_mesh(mesh))


def find_adapter(chunks: Sequence[nn.Module], optimizer: Optimizer | None = None) -> type[Adapter]:
    """Find the adapter that recognises these modules; adapters of other packages come before the built-in ones.

    Models that no built-in adapter can read are refused.
    """
    registered = [kind for kind in _load_registered() if kind.recognizes(chunks)]
    if len(registered) > 1:
        names = ", ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in registered)
        raise CaptureError(f"several adapters recognise this model: {names}. Choose one with attach(adapter=...).")
    if registered:
        return registered[0]
    refuse_unknown(chunks, optimizer)
    return next(kind for entry in BUILT_IN if (kind := _load(entry)).recognizes(chunks))


def refuse_unknown(chunks: Sequence[nn.Module], optimizer: Optimizer | None) -> None:
    """Raise an error if parameters have a form that no built-in adapter can read, and would be judged wrongly."""
    for what, advice in _find_unknown(chunks, optimizer):
        raise CaptureError(f"TTrace cannot read the parameters of {what}. {advice}")


def _load_registered() -> Iterator[type[Adapter]]:
    """Load the adapters that other packages registered, once each: several entry points may name the same adapter."""
    own = {entry.value for entry in BUILT_IN}
    entries = {entry.value: entry for entry in entry_points(group=GROUP)}
    yield from (_load(entry) for value, entry in sorted(entries.items()) if value not in own)


def _load(entry: EntryPoint) -> type[Adapter]:
    try:
        kind = entry.load()
    except Exception as error:  # another package's code
        raise CaptureError(
            f"the adapter {entry.name} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}. "
            "Repair or uninstall the package that registered it."
        ) from error
    if not isinstance(kind, type) or not issubclass(kind, Adapter):
        raise CaptureError(
            f"the adapter {entry.name} ({entry.value}) is not a subclass of ttrace.adapters.adapter.Adapter."
        )
    return kind


def _find_unknown(chunks: Sequence[nn.Module], optimizer: Optimizer | None) -> Iterator[tuple[str, str]]:
    modules = [module for chunk in chunks for module in chunk.modules()]
    types = {type(each) for each in (*modules, *list_optimizers(optimizer))}
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in types}
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
