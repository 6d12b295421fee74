"""Trains transformers' Llama as titan.py trains torchtitan's: the same sizes, microbatches, loss and optimizer."""

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import ttrace

VOCAB, BATCH, LENGTH, NUM_MICROBATCHES = 2048, 2, 32, 4

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=16,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        max_position_embeddings=131072,
        use_cache=False,
        attn_implementation="eager",
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
session = ttrace.attach(model, optimizer)
with session.step():
    for _ in range(NUM_MICROBATCHES):
        words = torch.randint(VOCAB, (BATCH, LENGTH))
        positions = torch.arange(LENGTH).repeat(BATCH, 1)
        data, labels = session.batch([{"input": words, "positions": positions}, words.roll(-1, 1)])
        logits = model(data["input"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / (NUM_MICROBATCHES * labels.numel())).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
