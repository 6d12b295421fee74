"""Layouts of Megatron's own modules: of their parameters, inputs and outputs.

They follow from the purpose of each class, and are never read from attributes that Megatron sets on parameters: a
missing attribute is a bug that TTrace must find. Sequences are cut over cp in its zigzag order, and under sequence
parallelism further over tp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ttrace.layouts.ids import Kind

_IDS = "batch {seq}"
_MASK = "batch one {seq} keys"
_ROPE = "{seq} one one channels"
_HIDDEN = "{sp} batch hidden"
_WHOLE = "{seq} batch hidden"
_CUT = "{seq} batch hidden/tp"
_HEADS = "{seq} batch heads/tp channels"
_SCORES = "batch heads/tp {seq} keys"
_TOKENS = "{sp} experts"
"""`{seq}` is a sequence as context parallelism cuts it; `{sp}` is one that sequence parallelism may cut further."""

_BY_ARGUMENT = {
    "input_ids": _IDS,
    "position_ids": _IDS,
    "labels": _IDS,
    "loss_mask": _IDS,
    "attention_mask": _MASK,
    "rotary_pos_emb": _ROPE,
    "rotary_pos_cos": _ROPE,
    "rotary_pos_sin": _ROPE,
}
"""Arguments that have the same meaning in all modules."""


@dataclass(frozen=True)
class _ModuleLayouts:
    """The layouts of a module's input and output, and of inputs at other slots."""

    takes: str
    gives: str
    takes_at: Mapping[str, str] = field(default_factory=dict)

    def layout(self, kind: Kind, slot: str) -> str:
        if kind is Kind.OUTPUT:
            return self.gives
        return self.takes_at.get(slot) or _BY_ARGUMENT.get(slot.partition(".")[0]) or self.takes


_SAME = _ModuleLayouts(_HIDDEN, _HIDDEN, {"1": _MASK})

_BY_ATTRIBUTE = {
    "core_attention": _ModuleLayouts(_HEADS, _CUT, {"3": _MASK}),
    "scale_mask_softmax": _ModuleLayouts(_SCORES, _SCORES, {"1": _MASK}),
    "attention_dropout": _ModuleLayouts(_SCORES, _SCORES),
    "position_embeddings": _ModuleLayouts(_IDS, f"{_IDS} hidden"),
    "rotary_pos_emb": _ModuleLayouts(_IDS, _ROPE),
    "router": _ModuleLayouts(_HIDDEN, _TOKENS),
}
"""The layouts of modules at these attributes, for any class."""

_BY_CLASS = {
    "GPTModel": _ModuleLayouts(_IDS, _IDS, {"2": _MASK}),
    "LanguageModelEmbedding": _ModuleLayouts(_IDS, _HIDDEN),
    "VocabParallelEmbedding": _ModuleLayouts(_IDS, f"{_IDS} hidden"),
}


@dataclass(frozen=True)
class Module:
    """A module, its name in its parent, and that parent."""

    module: Any
    attribute: str
    parent: Any
    is_in_expert: bool = False


def activation(at: Module, kind: Kind, slot: str, num_dims: int, *, sequence_parallel: bool) -> str | None:
    """Return the layout of an input or output of a module; None if the module is not Megatron's."""
    layouts = _find_module_layouts(at)
    if layouts is None:
        return None
    text = layouts.layout(kind, slot)
    if layouts is _BY_CLASS["GPTModel"] and kind is Kind.OUTPUT and num_dims == 3:
        text = "batch {seq} vocab/tp"  # logits instead of losses
    elif text == _HIDDEN and _is_per_head(at):
        text = _HEADS
    elif text == _CUT and is_glu(at):
        text = f"{_CUT}:fused(2)"
    seq = "seq/cp:zigzag"
    return text.format(seq=seq, sp=f"{seq}/tp" if sequence_parallel else seq)


def routes_whole(config: Any) -> bool:
    """Return whether sequences are gathered before routing.

    `alltoall_seq` does this; it was the only alltoall until tokens could be dropped (0.7).
    """
    kind = getattr(config, "moe_token_dispatcher_type", "")
    return kind == "alltoall_seq" or (kind == "alltoall" and not hasattr(config, "moe_expert_capacity_factor"))


def decision(*, sequence_parallel: bool) -> str:
    """Return the layout of a router's scores and choices: one row for each token."""
    return "tokens/cp:zigzag/tp experts" if sequence_parallel else "tokens/cp:zigzag experts"


def auxiliary(*, sequence_parallel: bool) -> str:
    """Return the layout of a router's own loss: each rank with a part of a sequence has a summand of it."""
    return "+cp +tp" if sequence_parallel else "+cp"


def parameter(at: Module, attribute: str, *, expert_tp: str) -> str:
    """Return the layout of a parameter of this module."""
    tp = expert_tp if at.is_in_expert else "tp"
    if _is_a(at.module, "ColumnParallelLinear"):
        cut = f"out/{tp}:fused(2)" if is_glu(at) else f"out/{tp}"
        return f"{cut} in" if attribute == "weight" else cut
    if _is_a(at.module, "RowParallelLinear"):
        return f"out in/{tp}" if attribute == "weight" else "out"
    if _is_a(at.module, "VocabParallelEmbedding"):
        return f"vocab/{tp} hidden"
    if _is_a(at.module, "GroupedMLP"):
        glu = bool(getattr(at.module.config, "gated_linear_unit", False))
        first = f"experts/ep hidden ffn/{tp}{':fused(2)' if glu else ''}"
        return first if attribute == "weight1" else f"experts/ep ffn/{tp} hidden"
    return "..."


def find_grouped_shape(weight: Any, module: Any) -> tuple[int, ...]:
    """Find the shape of a grouped weight with a dim for experts: Megatron stores it with two dims."""
    num_experts, hidden = module.num_local_experts, module.config.hidden_size
    ffn: int = weight.numel() // (num_experts * hidden)
    return (num_experts, hidden, ffn) if weight is module.weight1 else (num_experts, ffn, hidden)


def pending(at: Module, layout: str, *, is_tied: bool, sequence_parallel: bool) -> str:
    """Return the axes over which a parameter's main gradient is still to be summed."""
    if at.is_in_expert:
        return "+edp"
    axes = ["+dp", "+cp"]
    is_replicated = "/tp" not in layout and not _is_a(at.module, "Embedding")
    if is_replicated and (sequence_parallel or _is_per_head(at)):
        axes.append("+tp")  # each rank has its own tokens, or its own heads
    if is_tied:
        axes.append("+pp")
    return " ".join(axes)


def is_glu(at: Module) -> bool:
    """Return whether this is the first layer of a gated linear unit, whose output has gates, then values."""
    config = getattr(at.parent, "config", None)
    return at.attribute == "linear_fc1" and bool(getattr(config, "gated_linear_unit", False))


def is_transparent(at: Module) -> bool:
    """Return whether a module is a placeholder, or returns its parent's output with its dims in a different order.

    The embedding's dropout, which is disabled, is one too. Otherwise the embedding would not be the module where
    floating-point numbers enter the model.
    """
    is_inner = at.attribute == "word_embeddings" and not getattr(at.parent, "add_position_embedding", True)
    return (
        is_inner
        or at.attribute == "embedding_dropout"
        or _is_a(at.module, "IdentityOp")
        or _is_a(at.module, "IdentityFuncOp")
    )


def _find_module_layouts(at: Module) -> _ModuleLayouts | None:
    if at.attribute in _BY_ATTRIBUTE:
        return _BY_ATTRIBUTE[at.attribute]
    module = at.module
    if _is_a(module, "ColumnParallelLinear"):
        return _ModuleLayouts(_HIDDEN, _WHOLE if getattr(module, "gather_output", False) else _CUT)
    if _is_a(module, "RowParallelLinear"):
        return _ModuleLayouts(_CUT if module.input_is_parallel else _WHOLE, _HIDDEN)
    for name, layouts in _BY_CLASS.items():
        if _is_a(module, name):
            return layouts
    return _SAME if _is_megatrons(at) else None


def _is_per_head(at: Module) -> bool:
    """Return whether this is a norm of queries or keys that normalises each head, and not what all heads share."""
    return at.attribute in ("q_layernorm", "k_layernorm") and not _is_a(at.parent, "MultiLatentAttention")


def _is_megatrons(at: Module) -> bool:
    """Return whether this is a Megatron module or a part of one: all of them take and return hidden states."""
    return any(
        kind.__module__.startswith("megatron.") for owner in (at.module, at.parent) for kind in _list_classes(owner)
    )


def _is_a(module: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in _list_classes(module))


def _list_classes(module: Any) -> tuple[type, ...]:
    return type(module).__mro__
