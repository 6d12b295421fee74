"""Models with the shapes of large published ones, built by transformers."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns about every CUDA library that is missing


@dataclass(frozen=True)
class Large:
    """A model's family and shape. `settings` are those of its config that its family's other models change too."""

    family: str
    num_layers: int
    vocab: int
    settings: dict[str, Any]

    def cut(self, num_layers: int | None = None, vocab: int | None = None, **settings: Any) -> Large:
        """The same with fewer layers or words, or other settings."""
        return replace(
            self,
            num_layers=num_layers or self.num_layers,
            vocab=vocab or self.vocab,
            settings=self.settings | settings,
        )

    def build(self, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        """The model on whatever device torch is set to; experts run one by one, so that each has its own gradient."""
        import transformers

        auto: Any = transformers.AutoModelForCausalLM  # it has no types
        config = transformers.AutoConfig.for_model(
            self.family,
            vocab_size=self.vocab,
            num_hidden_layers=self.num_layers,
            use_cache=False,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=None,
            **self.settings,
        )
        model: nn.Module = auto.from_config(config, dtype=dtype, experts_implementation="eager")
        return model.train()


def _llama(num_layers: int, hidden: int, ffn: int, heads: int) -> Large:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    settings = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "rope_parameters": rope,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    }
    return Large("llama", num_layers, 128256, settings)


def _deepseek(
    num_layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    *,
    experts: int,
    expert_ffn: int,
    top: int,
    shared: int,
    groups: int,
    dense: int,
    top_groups: int = 1,
    q_rank: int | None = None,
) -> Large:
    settings = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "moe_intermediate_size": expert_ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": shared,
        "n_routed_experts": experts,
        "num_experts_per_tok": top,
        "n_group": groups,
        "topk_group": top_groups,
        "first_k_dense_replace": dense,
        "q_lora_rank": q_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "routed_scaling_factor": 2.5,
    }
    return Large("deepseek_v3", num_layers, 129280, settings)


MODELS = {
    "llama-8b": _llama(32, 4096, 14336, 32),
    "llama-70b": _llama(80, 8192, 28672, 64),
    "llama-405b": _llama(126, 16384, 53248, 128),
    "deepseek-16b": _deepseek(27, 2048, 10944, 16, experts=64, expert_ffn=1408, top=6, shared=2, groups=1, dense=1),
    "deepseek-236b": _deepseek(
        60,
        5120,
        12288,
        128,
        experts=160,
        expert_ffn=1536,
        top=6,
        shared=2,
        groups=8,
        top_groups=3,
        dense=1,
        q_rank=1536,
    ),
    "deepseek-v3": _deepseek(
        61,
        7168,
        18432,
        128,
        experts=256,
        expert_ffn=2048,
        top=8,
        shared=1,
        groups=8,
        top_groups=4,
        dense=3,
        q_rank=1536,
    ),
}
"""Published shapes; the smaller DeepSeeks in V3's code, and V3 without its module for predicting a second word."""
