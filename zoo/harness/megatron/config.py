"""Translation of a case into Megatron's transformer config and layer spec.

Imported after `install`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import transformer_config as configs
from megatron.core.transformer.spec_utils import ModuleSpec

from zoo.harness.megatron import versions
from zoo.harness.megatron.case import Case
from zoo.harness.megatron.layers import Attention, Mixer, SequenceNorm

UNFUSED: dict[str, Any] = {
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "async_tensor_model_parallel_allreduce": False,
}
"""Kernels that a CPU does not have."""

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
}


def transformer_config(case: Case) -> Any:
    kind = configs.MLATransformerConfig if case.mla else configs.TransformerConfig
    parts = _shape(case) | _layout(case) | _numerics(case) | UNFUSED | RECOMPUTE[case.recompute]
    return versions.call(kind, **parts, **_experts(case), **_latent(case))


def layer_spec(case: Case, config: Any, vp_stage: int | None) -> Any:
    """The layers of megatron-core itself, with stand-ins where only TransformerEngine has one."""
    asked: dict[str, Any] = {"num_experts": case.experts or None, "moe_grouped_gemm": case.grouped}
    if case.mla:
        asked |= {"multi_latent_attention": True, "qk_layernorm": True}
    if case.qk_norm:
        asked |= {"qk_layernorm": True}
    spec = versions.call(gpt_layer_specs.get_gpt_layer_local_spec, **asked)
    attention = spec.submodules.self_attention.submodules
    if case.cp > 1 or case.mla:
        attention.core_attention = Attention
    if case.custom:
        spec.submodules.mlp = ModuleSpec(module=Mixer, params={"transposed": case.custom == "transposed"})
    if config.normalization == "RMSNorm":  # MLA brings it by itself
        _normed(spec.submodules, "input_layernorm", "pre_mlp_layernorm")
        _normed(attention, *(("q_layernorm", "kv_layernorm") if case.mla else ()))
        _normed(attention, *(("q_layernorm", "k_layernorm") if case.qk_norm else ()))
        return versions.block_spec(spec, config, vp_stage, SequenceNorm)
    return spec


def _normed(submodules: Any, *names: str) -> None:
    for name in names:
        setattr(submodules, name, SequenceNorm)


def _shape(case: Case) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "num_layers": case.layers,
        "hidden_size": case.hidden,
        "num_attention_heads": case.heads,
        "num_query_groups": case.groups or None,
        "ffn_hidden_size": case.ffn,
        "add_bias_linear": case.bias and not case.experts,  # 0.16.1 adds experts' biases only where tp cuts them
        "hidden_dropout": case.dropout,
        "layernorm_epsilon": case.eps,
        "attention_dropout": case.dropout,
    }
    if case.swiglu:
        shape |= {"gated_linear_unit": True, "activation_func": F.silu}
    if case.qk_norm:
        shape |= {"qk_layernorm": True}
    if case.rmsnorm:
        shape |= {"normalization": "RMSNorm"}
    return shape


def _layout(case: Case) -> dict[str, Any]:
    batched = case.batched_p2p or case.vpp == 1
    assert batched or not case.deallocate, "on a CPU nothing keeps memory until an overlapped send has read it"
    layout = {
        "tensor_model_parallel_size": case.tp,
        "sequence_parallel": case.sp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp if case.vpp > 1 else None,
        "context_parallel_size": case.cp,
        "expert_model_parallel_size": case.ep,
        "batch_p2p_comm": batched,
        "overlap_p2p_comm": not batched,
        "deallocate_pipeline_outputs": case.deallocate,
        "use_cpu_initialization": True,
    }
    return layout | ({"expert_tensor_parallel_size": case.etp} if case.etp else {})


def _numerics(case: Case) -> dict[str, Any]:
    dtype: torch.dtype = getattr(torch, case.dtype)
    numerics: dict[str, Any] = {
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "attention_softmax_in_fp32": True,
    }
    return numerics | ({"calculate_per_token_loss": True} if case.per_token else {})


def _experts(case: Case) -> dict[str, Any]:
    if not case.experts:
        return {}
    experts: dict[str, Any] = {
        "num_moe_experts": case.experts,
        "moe_router_topk": case.topk,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": case.aux_loss,
        "moe_token_dispatcher_type": case.dispatcher,
        "moe_grouped_gemm": case.grouped,
    }
    if case.sigmoid:
        experts |= {
            "moe_router_load_balancing_type": "none",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": 2.5,
        }
    return experts | ({"moe_shared_expert_intermediate_size": case.ffn} if case.shared_expert else {})


def _latent(case: Case) -> dict[str, Any]:
    if not case.mla:
        return {}
    head = case.hidden // case.heads
    ranks = {"q_lora_rank": case.hidden // 2, "kv_lora_rank": case.hidden // 2}
    return ranks | {"qk_head_dim": head, "qk_pos_emb_head_dim": head // 2, "v_head_dim": head, "rope_type": "rope"}
