"""Trains a LoRA adapter of PEFT with transformers' Trainer; with `--fa` by LoRA-FA, and layers of another rank."""

import argparse

from peft import LoraConfig, get_peft_model
from peft.optimizers import create_lorafa_optimizer
from tiny import BATCH, NUM_MICROBATCHES, WORLD, Sentences, make_model
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--fa", action="store_true")
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
ranks = {"rank_pattern": {"v_proj": 2}} if options.fa else {}
config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **ranks)
model = get_peft_model(make_model(), config)
optimizer = create_lorafa_optimizer(model, r=4, lora_alpha=alpha, lr=1e-3) if options.fa else None


class MyTrainer(Trainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * WORLD if options.bug == "loss" else loss


MyTrainer(model, arguments, train_dataset=Sentences(), optimizers=(optimizer, None)).train()
