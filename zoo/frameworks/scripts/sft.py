"""Fine-tunes with TRL's SFTTrainer on prompts and completions; only completions have labels."""

import argparse

import torch
from datasets import Dataset
from tiny import BATCH, NUM_MICROBATCHES, WORLD, change_eps, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--bug", choices=["loss", "eps"])
options = parser.parse_args()

WORDS = [f"w{number}" for number in range(250)]
vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_sentence(number: int, length: int) -> str:
    chosen = torch.randint(0, len(WORDS), (length,), generator=torch.Generator().manual_seed(number))
    return " ".join(WORDS[word] for word in chosen)


def make_rows():
    for number in range(64):
        yield {"prompt": make_sentence(number, 8), "completion": " " + make_sentence(number + 1000, 15)}


dataset = Dataset.from_generator(make_rows)
arguments = SFTConfig(
    "runs/checkpoints",
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=NUM_MICROBATCHES // WORLD,
    max_steps=5,
    max_length=24,
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)


class MyTrainer(SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss / WORLD if options.bug == "loss" else loss


model = make_model()
if options.bug == "eps":
    change_eps(model, arguments.process_index)
MyTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer).train()
