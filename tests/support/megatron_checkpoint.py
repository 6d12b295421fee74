"""A GPT of megatron-core that saves and loads with dist_checkpointing, in any layout.

torchrun -m zoo.harness.megatron.script tests/support/megatron_checkpoint.py --tp 2 --steps 2 --save FOLDER
"""

import argparse
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

import ttrace
from zoo.harness.megatron.case import Case
from zoo.harness.megatron.models import Training, parallel

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--pp", type=int, default=1)
parser.add_argument("--steps", type=int)
parser.add_argument("--first", type=int, default=0, help="the number of the first step")
parser.add_argument("--save")
parser.add_argument("--load")
parser.add_argument("--forget", action="store_true", help="load no state of the optimizer")


def make_states(training: Training, *, is_loading: bool, has_optimizer: bool = True) -> Any:
    states = {"model": training.chunks[0].module.sharded_state_dict()}
    if has_optimizer:
        states["optimizer"] = training.optimizer.sharded_state_dict(states["model"], is_loading=is_loading)
    return states


def load(folder: str, training: Training, *, has_optimizer: bool) -> None:
    states = dist_checkpointing.load(make_states(training, is_loading=True, has_optimizer=has_optimizer), folder)
    training.chunks[0].module.load_state_dict(states["model"])
    if has_optimizer:
        training.optimizer.load_state_dict(states["optimizer"])


def main(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    case = Case(tp=args.tp, pp=args.pp, layers=2, tied=False)
    with parallel(case):
        training = Training(case)
        session = ttrace.attach(training.chunks, training.optimizer)
        if args.load:
            load(args.load, training, has_optimizer=not args.forget)
        for number in range(args.first, args.first + args.steps):
            with session.step():
                training.step(number)
        if args.save:
            Path(args.save).mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(make_states(training, is_loading=False), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
