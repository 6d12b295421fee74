"""DeepSpeed's ZeRO-1 that saves and loads universal checkpoints; without torchrun, plain PyTorch in one process.

`--forget` goes on from the weights of DeepSpeed's own checkpoint alone: DeepSpeed 0.19.8 loads the optimizer
of a universal one also with `load_optimizer_states=False`.
"""

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ttrace

VOCAB, NUM_ROWS = 50, 4 // int(os.environ.get("WORLD_SIZE", "1"))
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--load")
parser.add_argument("--save")
parser.add_argument("--forget", action="store_true", help="load no state of the optimizer")


def make_engine(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_universal: bool) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed: Any = importlib.import_module("deepspeed")
    # It would be compiled, for minutes.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": NUM_ROWS,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 1},
        "checkpoint": {"load_universal": is_universal},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def save(engine: Any, folder: str) -> None:
    """Save a checkpoint of DeepSpeed, and beside it the universal one that is made of it."""
    engine.save_checkpoint(folder, tag="own")
    if engine.global_rank == 0:
        options = argparse.Namespace(
            input_folder=str(Path(folder, "own")),
            output_folder=str(Path(folder, "universal")),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        importlib.import_module("deepspeed.checkpoint.ds_to_universal").main(options)


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCAB, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, VOCAB)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    has_engine = "WORLD_SIZE" in os.environ
    engine: Any = make_engine(model, optimizer, is_universal=not args.forget) if has_engine else None
    session = ttrace.attach(engine) if has_engine else ttrace.attach(model, optimizer)
    if args.load:
        engine.load_checkpoint(args.load, load_optimizer_states=not args.forget)
    for _ in range(args.steps):
        with session.step():
            batch = session.batch({name: torch.randint(VOCAB, (NUM_ROWS, 8)) for name in ("ids", "labels")})
            logits = (engine if has_engine else model)(batch["ids"])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            if has_engine:
                engine.backward(loss)
                engine.step()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    if args.save:
        save(engine, args.save)


if __name__ == "__main__":
    main(parser.parse_args())
