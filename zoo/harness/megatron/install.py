"""Replacements with which an unmodified megatron-core wheel runs on CPU tensors with gloo.

`REPLACED` lists everything that is replaced, with the reason: device placement, streams, the random generator, and
kernels that are missing on a CPU. Megatron's own arithmetic is not touched: tests/megatron/test_runtime.py compares it
with plain PyTorch.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import packaging.version
import torch
from packaging.version import Version

from zoo.harness.megatron import packages, standins
from zoo.harness.megatron.wheels import NEWEST, wheel


@dataclass(frozen=True)
class Replaced:
    """A name outside Megatron that means something else on a CPU."""

    name: str
    by: Any
    why: str
    used: str = ""
    """How a wheel spells its use, where that is not the name."""
    until: str | None = None
    """The last wheel that uses it, if one does not."""

    @property
    def spelling(self) -> str:
        return self.used or self.name


@dataclass(frozen=True)
class Wrapped(Replaced):
    """As above, where `by` makes the new thing from the old."""


_PLACE = "there is one device, the CPU"
_STREAM = "there are no streams: work is done when a call returns"
_RANDOM = "the generator that GPU kernels draw from is the CPU's"

REPLACED: tuple[Replaced, ...] = (
    Replaced("torch.cuda.current_device", standins.current_device, _PLACE),
    Replaced("torch.Tensor.cuda", standins.itself, _PLACE, ".cuda("),
    Replaced("torch.nn.Module.cuda", standins.itself, _PLACE, ".cuda("),
    Wrapped("torch.tensor", standins.on_cpu, _PLACE, "device='cuda')"),
    Wrapped("torch.zeros", standins.on_cpu, _PLACE, 'torch.zeros([], dtype=torch.int, device="cuda")'),
    Wrapped("torch.ones", standins.on_cpu, _PLACE, 'torch.ones(sq, sq, device="cuda")'),
    Wrapped(
        "torch.Tensor.type", standins.type_name, "optimizers know types by their GPU names", "'torch.cuda.FloatTensor'"
    ),
    Replaced("torch.cuda.Stream", standins.Stream, _STREAM),
    Replaced("torch.cuda.Event", standins.Event, _STREAM),
    Replaced("torch.cuda.current_stream", standins.current_stream, _STREAM),
    Replaced("torch.cuda.default_stream", standins.current_stream, _STREAM),
    Replaced("torch.cuda.stream", standins.stream_context, _STREAM),
    Replaced("torch.cuda.synchronize", standins.nothing, _STREAM),
    Replaced("torch.Tensor.record_stream", standins.nothing, _STREAM, ".record_stream("),
    Replaced("torch.cuda.nvtx.range_push", standins.nothing, "there is no profiler of the GPU"),
    Replaced("torch.cuda.nvtx.range_pop", standins.nothing, "there is no profiler of the GPU"),
    Replaced("torch.cuda.default_generators", standins.Generators(), _RANDOM),
    Replaced("torch.cuda.get_rng_state", standins.rng_state, _RANDOM),
    Replaced("torch.cuda.random.get_rng_state", standins.rng_state, _RANDOM),
    Replaced("torch.cuda.set_rng_state", standins.set_rng_state, _RANDOM),
    Replaced("torch.cuda.manual_seed", standins.manual_seed, _RANDOM),
    Replaced(
        "torch.cuda._lazy_call", standins.call_at_once, "or seeds would wait for a GPU, silently", "_lazy_call(cb)"
    ),
    Wrapped("torch.distributed.all_to_all_single", standins.all_to_all_single, "sizes stay tensors on a CPU"),
    Wrapped("torch.distributed.all_gather", standins.all_gather, "gloo gathers only parts of one size"),
    Wrapped("torch.distributed.reduce_scatter", standins.reduce_scatter, "gloo scatters only parts of one size"),
    Replaced("torch.compile", standins.uncompiled, "it takes longer than the step"),
    Wrapped("torch.histc", standins.counted, "the CPU counts no whole numbers", until="0.9.0"),
    Wrapped(
        "importlib.metadata.version",
        packages.version,
        "TransformerEngine is asked for its version",
        until="0.7.0",
        used='version("transformer-engine")',
    ),
)


@dataclass(frozen=True)
class Absent:
    """A module that is not there, of which wheels of these versions import something without asking."""

    module: str
    contents: Callable[[], dict[str, Any]]
    why: str
    until: str | None = None
    since: str = "0.0.0"


ABSENT: tuple[Absent, ...] = (
    Absent(
        "apex.normalization.fused_layer_norm",
        lambda: {"FusedLayerNormAffineFunction": standins.LayerNormKernel},
        "the norm that works with sequence parallelism needs this kernel",
    ),
    Absent("grouped_gemm.ops", lambda: {"gmm": standins.grouped_product}, "experts in one weight need this kernel"),
    Absent("pkg_resources", lambda: {"packaging": packaging}, "setuptools no longer brings it", "0.8.0"),
    Absent("transformer_engine.pytorch", packages.transformer_engine, "layers are derived from its own", "0.7.0"),
    Absent(
        "transformer_engine.common.recipe", lambda: {"DelayedScaling": object}, "a recipe is derived from it", "0.7.0"
    ),
    Absent(
        "apex.optimizers",
        lambda: {"FusedAdam": packages.FusedAdam, "FusedSGD": torch.optim.SGD},
        "its kernels are missing",
        "0.9.0",
    ),
    Absent(
        "apex.multi_tensor_apply",
        lambda: {"multi_tensor_applier": packages.apply_to_all},
        "its kernels are missing",
        "0.7.0",
    ),
    Absent(
        "amp_C",
        lambda: {"multi_tensor_l2norm": packages.norm_of_all, "multi_tensor_scale": packages.scale_all},
        "its kernels are missing",
        "0.7.0",
    ),
    Absent("triton", packages.triton, "kernels that nobody calls are declared with it", since="0.18.0"),
    Absent("triton.language", packages.triton_language, "their arguments have its types", since="0.18.0"),
)


@dataclass(frozen=True)
class Unbound:
    """A name that these wheels use although it means something only where TransformerEngine is installed."""

    module: str
    name: str
    by: Any
    since: str
    until: str | None = None

    def is_in(self, version: str) -> bool:
        return Version(self.since) <= Version(version) and not _is_after(version, self.until)


_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
UNBOUND: tuple[Unbound, ...] = (
    Unbound("megatron.core.transformer.moe.moe_utils", "te_general_gemm", None, "0.13.0"),
    Unbound("megatron.core.transformer.multi_latent_attention", "TELinear", standins.Nobody, "0.14.0"),
    Unbound("megatron.core.fp8_utils", "_quantize_param_shard_impl", standins.no_float8, "0.12.0", "0.12.3"),
    Unbound(_SPECS, "TEColumnParallelGroupedLinear", None, "0.10.0", "0.10.0"),
    Unbound(_SPECS, "TEColumnParallelLinear", None, "0.10.0", "0.10.0"),  # as shared experts, which we then lack
    Unbound(_SPECS, "TERowParallelLinear", None, "0.10.0", "0.10.0"),
)


def install(version: str = NEWEST) -> None:
    """Make `import megatron.core` give this version, on CPU; once in a process, before that import."""
    assert not any(name.startswith("megatron.core") for name in sys.modules), "megatron was imported before"
    sys.path.insert(0, str(wheel(version)))
    warnings.filterwarnings("ignore", module="megatron")  # most say that a kernel is missing
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # old names of collectives
    for replaced in REPLACED:
        if not _is_after(version, replaced.until):
            replace(replaced)
    for absent in ABSENT:
        if Version(absent.since) <= Version(version) and not _is_after(version, absent.until):
            supply(absent)
    for unbound in UNBOUND:
        if unbound.is_in(version):
            setattr(importlib.import_module(unbound.module), unbound.name, unbound.by)


def _is_after(version: str, until: str | None) -> bool:
    return until is not None and Version(version) > Version(until)


def replace(replaced: Replaced) -> None:
    path, _, name = replaced.name.rpartition(".")
    owner = pkgutil.resolve_name(path)
    new = replaced.by(getattr(owner, name)) if isinstance(replaced, Wrapped) else replaced.by
    setattr(owner, name, new)


def supply(absent: Absent) -> None:
    if absent.module == "triton":
        importlib.import_module("torch._inductor.compile_fx")  # later it would take the stand-in for triton
    parts = absent.module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if name not in sys.modules:
            standins.module(name)
    vars(sys.modules[absent.module]).update(absent.contents())
