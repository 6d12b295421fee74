"""Trains torchtitan's debug model of Llama 3 with its own Trainer, on random words."""

import argparse
import json
import random
import tempfile
from pathlib import Path

import one_process  # noqa: F401
import titan_on_cpu  # noqa: F401
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models.llama3 import config_registry, model_registry

parser = argparse.ArgumentParser()
for axis in ("dp", "tp", "cp", "pp"):
    parser.add_argument(f"--{axis}", type=int, default=1)
parser.add_argument("--backend", default="spmd_types")
parser.add_argument("--chunked", action="store_true", help="keep torchtitan's own loss, which runs the head by itself")
parser.add_argument("--length", type=int, default=32)
parser.add_argument("--bug", choices=("eps",))
options = parser.parse_args()

NUM_WORDS, BATCH, NUM_MICROBATCHES = 2000, 2, 4


def write_words(folder: Path) -> None:
    """Write a tokenizer and sentences."""
    words = [f"w{number}" for number in range(NUM_WORDS)]
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    draw = random.Random(0)
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=60))}) + "\n" for _ in range(200)]
    (folder / "data").mkdir()
    (folder / "data" / "sentences.json").write_text("".join(lines))


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    write_words(folder)
    config = config_registry.llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.hf_assets_path, config.dataloader.dataset_path = str(folder), str(folder / "data")
    config.dump_folder = str(folder / "outputs")
    training, parallelism = config.training, config.parallelism
    training.seq_len, training.steps = options.length, 4
    training.local_batch_size = BATCH if options.pp == 1 else BATCH * NUM_MICROBATCHES
    training.global_batch_size = BATCH * NUM_MICROBATCHES
    training.mixed_precision_param, training.disable_cuda_graphs = "float32", True
    if not options.chunked:
        config.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
    config.activation_checkpoint = None
    config.validator.freq = config.checkpoint.interval = 1000
    config.optimizer.implementation = "for-loop"
    config.debug.seed = 0
    parallelism.spmd_backend = options.backend
    parallelism.data_parallel_shard_degree, parallelism.tensor_parallel_degree = options.dp, options.tp
    parallelism.context_parallel_degree, parallelism.pipeline_parallel_degree = options.cp, options.pp
    parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_microbatch_size = "1F1B", BATCH
    trainer = config.build()
    if options.bug and dist.get_rank() == dist.get_world_size() - 1:
        for part in trainer.model_parts:
            part.layers["5"].ffn_norm.eps = 1e-2
    trainer.train()
    trainer.close()
dist.destroy_process_group()
