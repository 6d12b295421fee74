"""Trains a LoRA adapter of PEFT with transformers' Trainer."""

import argparse

from peft import LoraConfig, get_peft_model
from tiny import BATCH, NUM_MICROBATCHES, WORLD, Sentences, make_model
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--bug", choices=["scaling", "loss"])
options = parser.parse_args()

arguments = TrainingArguments(
    "runs/checkpoints",
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=NUM_MICROBATCHES // WORLD,
    max_steps=5,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
alpha = 16 if options.bug == "scaling" and arguments.process_index else 8
config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
model = get_peft_model(make_model(), config)


class MyTrainer(Trainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * WORLD if options.bug == "loss" else loss


MyTrainer(model, arguments, train_dataset=Sentences()).train()
