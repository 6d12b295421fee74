"""A Llama of transformers under its own tensor parallelism, without any annotation for TTrace.

`--bug` doubles a gradient on every rank, as a reduction does that runs once too often.
"""

import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import ttrace  # 1

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"

if DEVICE != "cpu":
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
with tempfile.TemporaryDirectory() as folder:  # instead of a checkpoint from the hub
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if WORLD > 1:  # only now, as save_pretrained writes on the first rank alone
        dist.init_process_group(dist.get_default_backend_for_device(DEVICE))
    plan = {"tp_plan": "auto"} if WORLD > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **plan).to(DEVICE)
if WORLD > 1 and "--bug" in sys.argv:
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: 2 * gradient)

# Not foreach, which is the default on accelerators: it takes no DTensors beside other tensors.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
session = ttrace.attach(model, optimizer)  # 2
for step in range(10):
    with session.step():  # 3
        ids, labels = torch.randint(64, (2, 2, 8), device=DEVICE)
        batch = session.batch({"input_ids": ids, "labels": labels})  # 4
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
if WORLD > 1:
    dist.destroy_process_group()
