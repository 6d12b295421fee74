"""Cases: ways to build and run a small model with megatron-core."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Case:
    """A small GPT, its layout, its numerics and its batch. What is left of the ranks is data parallel."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    """Chunks of the model on each stage."""
    cp: int = 1
    ep: int = 1
    etp: int = 0
    """Tensor parallelism of experts; 0 for the same as `tp`."""

    zero: bool = False
    """The distributed optimizer."""
    overlap_grads: bool = False
    overlap_params: bool = False
    batched_p2p: bool = False
    """Batch sends and receives also where stages have several chunks, which Megatron-LM does not do."""
    deallocate: bool = False
    """Free what a stage has sent (`deallocate_pipeline_outputs`). Not with `vpp`: gloo may send it only afterwards."""
    recompute: Literal["none", "full", "selective"] = "none"

    layers: int = 4
    hidden: int = 32
    heads: int = 4
    groups: int = 0
    """Query groups; 0 for one to each head."""
    ffn: int = 48
    vocab: int = 64
    length: int = 16
    tied: bool = True
    bias: bool = True
    swiglu: bool = False
    rope: bool = False
    rmsnorm: bool = False
    eps: float = 1e-5
    mla: bool = False
    qk_norm: bool = False
    """Norms of queries and keys."""
    experts: int = 0
    topk: int = 2
    grouped: bool = False
    """All experts of a rank in one weight (`moe_grouped_gemm`)."""
    shared_expert: bool = False
    sigmoid: bool = False
    """Routers choose by sigmoids and a bias, as in DeepSeek-V3."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    aux_loss: float = 1e-2
    custom: Literal["", "contiguous", "transposed"] = ""
    """A layer of our own in place of MLPs, and what it has Megatron reduce."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    dropout: float = 0.0
    per_token: bool = False
    """Divide by the tokens of the whole batch (`calculate_per_token_loss`), not of each microbatch."""
    masked: bool = False
    """Some tokens do not count. With `cp`, only `per_token` then gives what one process gives."""
    clip: float = 1.0

    samples: int = 8
    """Of the whole batch."""
    micro: int = 2
    """Of a microbatch."""

    @property
    def reference(self) -> Case:
        """The same model on the same batch, in one process."""
        return replace(self, **{name: DEFAULT[name] for name in LAYOUT})

    @property
    def model_ranks(self) -> int:
        """Ranks that together see one microbatch."""
        return self.tp * self.pp * self.cp

    @property
    def name(self) -> str:
        """What differs from the default, such as `tp2-sp-bfloat16`."""
        words = [_word(name, getattr(self, name)) for name, value in DEFAULT.items() if getattr(self, name) != value]
        return "-".join(words) or "default"


@dataclass(frozen=True)
class Step:
    """The results of a step; the same on all ranks."""

    loss: float
    grad_norm: float | None
    updated: bool


def _word(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    return {True: name, False: f"not_{name}"}[value] if isinstance(value, bool) else f"{name}{value}"


DEFAULT: dict[str, Any] = {field.name: field.default for field in fields(Case)}
LAYOUT = tuple(DEFAULT)[: tuple(DEFAULT).index("layers")]
"""What may differ between a candidate and its reference: all that comes before the shape of the model."""
