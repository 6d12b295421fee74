"""Multi-latent attention under tensor parallelism: the gradient of the keys' rotary rows lacks a sum over ranks.

    pip install --no-deps megatron-core==0.16.1
    torchrun --standalone --nproc-per-node 2 mla_with_tp.py

Needs only megatron-core and torch. Without a GPU and TransformerEngine three names need a stand-in, marked below; the
attention itself is plain torch, given through the layer spec. The same weights and input give the same output on one
and on two ranks, and a gradient of `linear_kv_down_proj.weight` whose last rows differ.
"""

from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():  # stand-ins: tensors lie on the CPU, and have no streams
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig

if not isinstance(
    getattr(multi_latent_attention, "TELinear", None), type
):  # stand-in: without TransformerEngine it is no class
    multi_latent_attention.TELinear = type("TELinear", (), {})

HIDDEN, HEADS, RANK, ROPE, LENGTH = 32, 4, 16, 4, 6


class Attention(torch.nn.Module):
    """Softmax attention over this rank's heads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)


def gradient(tp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This layer's output, and the whole gradient of linear_kv_down_proj.weight, with tp ranks."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        add_bias_linear=False,
        q_lora_rank=RANK,
        kv_lora_rank=RANK,
        qk_head_dim=8,
        qk_pos_emb_head_dim=ROPE,
        v_head_dim=8,
        rope_type="rope",
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    parts = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention.submodules
    parts.core_attention, parts.q_layernorm, parts.kv_layernorm = Attention, IdentityOp, IdentityOp
    layer = multi_latent_attention.MLASelfAttention(config, parts, 1, AttnMaskType.causal)
    for name, parameter in layer.named_parameters():
        shape = list(parameter.shape)
        dim = 1 if "linear_proj" in name else 0
        shape[dim] *= tp
        whole = 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        parameter.data.copy_(whole.chunk(tp, dim)[parallel_state.get_tensor_model_parallel_rank()])
    x = torch.randn(LENGTH, 2, HIDDEN, generator=torch.Generator().manual_seed(1))
    output, _ = layer(x, None)
    output.square().sum().backward()
    group = parallel_state.get_tensor_model_parallel_group()
    grads = [torch.zeros_like(layer.linear_kv_down_proj.weight) for _ in range(tp)]
    dist.all_gather(grads, layer.linear_kv_down_proj.weight.grad, group=group)
    parallel_state.destroy_model_parallel()
    return output.detach(), torch.cat(grads)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    one, two = gradient(1), gradient(2)
    for what, ours, theirs in (
        ("output", one[0], two[0]),
        ("gradient of the compressed rows", one[1][:RANK], two[1][:RANK]),
        ("gradient of the rotary rows", one[1][RANK:], two[1][RANK:]),
    ):
        if dist.get_rank() == 0:
            print(f"{what}: tp=2 is {float((theirs - ours).norm() / ours.norm()):.1e} off")
    dist.destroy_process_group()
