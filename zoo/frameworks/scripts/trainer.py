"""Trains with transformers' Trainer: labels with -100, accumulation; label smoothing, FSDP2 or ZeRO if asked for."""

import argparse

from tiny import BATCH, NUM_MICROBATCHES, WORLD, Sentences, change_eps, make_model
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--smooth", action="store_true")
parser.add_argument("--zero", type=int)
parser.add_argument("--bug", choices=["items", "eps"])
options = parser.parse_args()

if options.zero is not None:
    import deepspeed_on_cpu  # noqa: F401
sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
zero = {**dict.fromkeys(sizes, "auto"), "zero_optimization": {"stage": options.zero}}
fsdp = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
arguments = TrainingArguments(
    "runs/checkpoints",
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=NUM_MICROBATCHES // WORLD,
    max_steps=5,
    label_smoothing_factor=0.1 if options.smooth else 0.0,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    **({"fsdp": "full_shard", "fsdp_config": fsdp} if options.fsdp else {}),
    deepspeed=None if options.zero is None else {**zero, "zero_allow_untested_optimizer": True},
)


class MyTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if options.bug == "items":  # a mean of means: sentences with a long prompt count more than others
            num_items_in_batch = None
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


model = make_model()
if options.bug == "eps":
    change_eps(model, arguments.process_index)
MyTrainer(model, arguments, train_dataset=Sentences(with_prompts=True)).train()
