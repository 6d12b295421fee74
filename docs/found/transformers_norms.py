"""transformers' tensor parallelism: gradients of norms inside attention that are summed too often, or never.

    torchrun --standalone --nproc-per-node 2 transformers_norms.py

Needs only torch and transformers (with accelerate, which transformers needs to load distributed models). The same small
models with the same weights and data run in one process and with `tp_plan="auto"` on two. The error of the gradient of
`q_norm` is printed.
"""

import os
import tempfile

import torch
import torch.distributed as dist

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
MODELS = {
    "qwen3_moe": {"num_experts": 4},
    "glm4_moe": {"n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True},
}


def gradient(folder: str, num_microbatches: int, **how: object) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, **how).train()
    draws = torch.Generator().manual_seed(0)
    for _ in range(num_microbatches):
        ids = torch.randint(48, (2, 8), generator=draws)
        (model(input_ids=ids, labels=ids).loss / num_microbatches).backward()
    found = model.model.layers[0].self_attn.q_norm.weight.grad
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def shared_folder() -> str:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    return str(folders[0])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, settings in MODELS.items():
        folder = shared_folder()
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL, **settings)).save_pretrained(folder)
        dist.barrier()
        for count in (1, 2):
            right = gradient(folder, count)
            wrong = gradient(folder, count, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))
            error = float((wrong - right).norm() / right.norm())
            if dist.get_rank() == 0:
                print(f"{name}, {count} microbatches: {error:.1e}")
    dist.destroy_process_group()
