"""A small Llama and random sentences, which the scripts of this folder train."""

import os

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
BATCH, NUM_MICROBATCHES, LENGTH = 2, 4, 24
"""The rows of a microbatch, the microbatches of a step on all ranks together, and the tokens of a row."""


class Sentences(Dataset):
    """Sentences of random tokens. With prompts, the first labels of a sentence are ignored."""

    def __init__(self, *, with_prompts: bool = False) -> None:
        self.with_prompts = with_prompts

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(number))
        labels = tokens.clone()
        if self.with_prompts:
            labels[: number % 5] = -100
        return {"input_ids": tokens, "labels": labels}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads))


def change_eps(model: torch.nn.Module, rank: int) -> None:
    """Plant a bug: the last rank has a norm with another eps."""
    if rank == WORLD - 1:
        model.get_submodule("model.layers.1.post_attention_layernorm").variance_epsilon = 0.1
