"""A transformers mixture of experts under FSDP2 and expert parallelism, without any annotation for TTrace.

On PyTorch 2.13 the gradients of the experts are half of what they should be: FSDP2 divides twice where it shards over a
single rank, which it does for experts that one rank holds completely. There is no crash and no warning, and the loss is
right. `--once` avoids the setting that causes it.
"""

import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

import ttrace  # 1

WORLD, NUM_MICROBATCHES = int(os.environ.get("WORLD_SIZE", "1")), 2
DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"

if DEVICE != "cpu":
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
config = Qwen3MoeConfig(
    vocab_size=96,
    hidden_size=32,
    head_dim=8,
    intermediate_size=64,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    use_cache=False,
)
with tempfile.TemporaryDirectory() as folder:  # instead of a checkpoint from the hub
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    distributed = DistributedConfig(fsdp_size=WORLD, ep_size=WORLD) if WORLD > 1 else None
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed).to(DEVICE)
if WORLD > 1 and "--once" in sys.argv:
    for layer in model.model.layers:
        layer.mlp.experts.set_force_sum_reduction_for_comms(False)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = ttrace.attach(model, optimizer)  # 2
for step in range(10):
    with session.step():  # 3
        num_mine = NUM_MICROBATCHES // WORLD  # each rank has its own data
        for _ in range(num_mine):
            ids, labels = torch.randint(96, (2, 2, 16), device=DEVICE)
            batch = session.batch({"input_ids": ids, "labels": labels})  # 4
            loss = model(**batch).loss / num_mine
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
if WORLD > 1:
    dist.destroy_process_group()
