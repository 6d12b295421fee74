"""Roles of modules: the words that the field has for the same part of a transformer."""

from __future__ import annotations

from collections.abc import Sequence

from ttrace.ports.name_pattern import ANY

_WORDS = {
    "embedding": "embedding embed_tokens word_embeddings tok_embeddings wte",
    "attention": "self_attn self_attention attn",
    "feed forward": "mlp feed_forward ffn",
    "first norm": "input_layernorm attention_norm ln_1",
    "second norm": "post_attention_layernorm pre_mlp_layernorm ffn_norm ln_2",
    "last norm": "norm final_layernorm ln_f",
    "head": "lm_head output_layer",
    "query": "q_proj wq",
    "key": "k_proj wk",
    "value": "v_proj wv",
    "query key value": "linear_qkv wqkv qkv_proj",
    "query norm": "q_norm q_a_layernorm q_layernorm",
    "key norm": "k_norm k_layernorm",
    "latent norm": "kv_a_layernorm kv_layernorm",
    "query down": "q_a_proj linear_q_down_proj",
    "query up": "q_b_proj linear_q_up_proj",
    "latent down": "kv_a_proj_with_mqa linear_kv_down_proj",
    "latent up": "kv_b_proj linear_kv_up_proj",
    "attention output": "o_proj linear_proj wo",
    "gate": "gate_proj w1",
    "up": "up_proj w3",
    "gate up": "linear_fc1 gate_up_proj",
    "down": "down_proj linear_fc2 w2",
    "router": "gate router",
    "routing bias": "e_score_correction_bias expert_bias",
}
_ROLES = {word: role for role, words in _WORDS.items() for word in words.split()}
JOINED = {"query key value": ("query", "key", "value"), "gate up": ("gate", "up")}
"""Roles that several modules have together, where one module does not have them all."""
_CONTAINERS = ("model", "decoder", "transformer", "encoder", "qkv_linear", "local_experts")
"""Modules that only hold others."""


def find_roles(name: str) -> tuple[str, ...]:
    """Return the roles of the modules around a module or parameter, and its own; unknown words are their own roles."""
    roles = [_ROLES.get(word, word) for word in name.split(".") if word not in _CONTAINERS]
    return tuple(
        role for place, role in enumerate(roles) if role == ANY or role not in roles[max(place - 1, 0) : place]
    )


def list_parts(roles: Sequence[str]) -> list[tuple[str, ...]]:
    """List the roles of the modules that together have these: those of the last word that is joined."""
    for place, role in enumerate(roles):
        if role in JOINED:
            return [(*roles[:place], part, *roles[place + 1 :]) for part in JOINED[role]]
    return []
