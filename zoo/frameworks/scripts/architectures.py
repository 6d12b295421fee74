"""Trains other models of transformers with accumulation, in a plain loop or with the Trainer.

With `--items` the model divides its loss by the number of labels in all microbatches.
"""

import argparse
import sys

import torch
from tiny import BATCH, LENGTH, NUM_MICROBATCHES, WORLD, Sentences
from torch.utils.data import DataLoader, Dataset
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["mixtral", "gemma3", "moonshine"])
parser.add_argument("--items", action="store_true")
parser.add_argument("--trainer", action="store_true")
options = parser.parse_args()

SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
NUM_STEPS, NUM_SAMPLES = 5, 4000
"""Of training, and of a sound."""


class Recordings(Dataset):
    """Random sounds, and random sentences that were said in them."""

    def __init__(self) -> None:
        self.sentences = Sentences()

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        sound = torch.randn(NUM_SAMPLES, generator=torch.Generator().manual_seed(number))
        return {"input_values": sound, "labels": self.sentences[number]["labels"]}


class Messages(Sentences):
    """Sentences, and which of their tokens stand for an image: none."""

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(number), "token_type_ids": torch.zeros(LENGTH, dtype=torch.int64)}


def make_mixtral() -> MixtralForCausalLM:
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, **experts, num_hidden_layers=2))


def make_gemma() -> Gemma3ForConditionalGeneration:
    text = {**SIZES, **HEADS, "head_dim": 8, "num_hidden_layers": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    tokens = {"mm_tokens_per_image": 4, "boi_token_index": 253, "eoi_token_index": 254, "image_token_index": 255}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **tokens))


def make_moonshine() -> MoonshineForConditionalGeneration:
    sides = {f"{side}_{name}": 4 for side in ("encoder", "decoder") for name in HEADS}
    layers = {"encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 1}
    return MoonshineForConditionalGeneration(MoonshineConfig(**SIZES, **sides, **layers, pad_token_id=0))


made = {
    "mixtral": (make_mixtral, Sentences()),
    "gemma3": (make_gemma, Messages()),
    "moonshine": (make_moonshine, Recordings()),
}
make, rows = made[options.model]
torch.manual_seed(0)
model = make().train()
if options.trainer:
    arguments = TrainingArguments(
        "runs/checkpoints",
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=NUM_MICROBATCHES // WORLD,
        max_steps=NUM_STEPS,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=rows).train()
    sys.exit()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
items = {"num_items_in_batch": NUM_MICROBATCHES * BATCH * (LENGTH - 1)} if options.items else {}
loader = iter(DataLoader(rows, BATCH))
for _ in range(NUM_STEPS):
    for _ in range(NUM_MICROBATCHES):
        loss = model(**next(loader), **items).loss
        (loss if items else loss / NUM_MICROBATCHES).backward()
    optimizer.step()
    optimizer.zero_grad()
