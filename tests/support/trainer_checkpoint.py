"""The Trainer of transformers, which goes on from its own checkpoints; `--forget` goes on from the weights alone."""

import argparse
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import ttrace

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, help="the step after which to stop")
parser.add_argument("--save", default="runs/unused", help="the folder of checkpoints; saved after two steps")
parser.add_argument("--load", help="the checkpoint to go on from")
parser.add_argument("--forget", action="store_true")


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Traced(TrainerCallback):
    """Each step of the Trainer is one of TTrace's."""

    session: ttrace.Session

    def on_train_begin(self, *_: Any, **known: Any) -> None:
        self.session = ttrace.attach(known["model"], known["optimizer"])

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._step = self.session.step()
        self._step.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._step.__exit__(None, None, None)


class BatchTrainer(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, traced.session.batch(inputs), *args, **kwargs)


args = parser.parse_args()
torch.manual_seed(0)
arguments = TrainingArguments(
    args.save,
    per_device_train_batch_size=4,
    max_steps=args.steps,
    save_strategy="steps",
    save_steps=2,
    learning_rate=1e-3,
    lr_scheduler_type="constant",  # any other one depends on the number of steps
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
traced = Traced()
start = LlamaForCausalLM.from_pretrained(args.load) if args.forget else LlamaForCausalLM(CONFIG)  # type: ignore[no-untyped-call]
trainer = BatchTrainer(start, arguments, train_dataset=Sentences(), callbacks=[traced])
trainer.train(resume_from_checkpoint=None if args.forget else args.load)
