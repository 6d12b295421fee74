"""This module measures what capturing a step costs with TTrace and with other tools, against the bare step.

The same model and the same tensors: what enters and leaves every module, the gradients of both, parameters and their
gradients; DebugMode has the outputs of every operator instead, as norms. msprobe keeps either four statistics of each
tensor or the tensor; TTrace a sketch or the tensor. CPU time is that of all threads. Each tool lives in a process of
its own, since msprobe cannot be taken off again; they take turns in random order, and each round gives one ratio.

msprobe is installed for this bench only, into its own folder (`~/.cache/ttrace/peers`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch

from bench._training import Training

MSPROBE = "mindstudio-probe==26.2.0"
_NEEDS = (
    *("pandas", "openpyxl", "et_xmlfile", "tensorboard", "tensorboard-data-server", "werkzeug", "absl-py", "grpcio"),
    *("markdown", "protobuf", "psutil", "pytz", "einops", "python-dateutil", "six"),
)
PEERS = Path.home() / ".cache" / "ttrace" / "peers"
NUM_ROUNDS, NUM_WARM_UPS = 7, 2

Step = Callable[[], Callable[[], None]]
"""Gives a step that is captured, ready to be timed."""


def bare(training: Training) -> Step:
    return lambda: training.step


def ours(record: Literal["full", "sketch"]) -> Callable[[Training], Step]:
    return lambda training: lambda: training.traced(record)


def msprobe(task: Literal["statistics", "tensor"]) -> Callable[[Training], Step]:
    def start(training: Training) -> Step:
        sys.path.append(str(PEERS))
        from msprobe.pytorch import PrecisionDebugger  # type: ignore[import-not-found]

        folder = training.plan.out
        folder.mkdir()
        how = {"task": task, "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": "L0"}
        (folder / "config.json").write_text(json.dumps(how | {task: {"scope": [], "list": [], "data_mode": ["all"]}}))
        debugger = PrecisionDebugger(config_path=str(folder / "config.json"))

        def step() -> None:
            debugger.start(model=training.model)
            training.step()
            debugger.stop()
            debugger.step()

        return lambda: step

    return start


def debug_mode(training: Training) -> Step:
    from torch.utils._debug_mode import DebugMode

    def step() -> None:
        with DebugMode(record_nn_module=True), DebugMode.log_tensor_hashes(hash_fn="norm"):
            training.step()

    return lambda: step


WAYS = {
    "bare": bare,
    "ttrace sketch": ours("sketch"),
    "ttrace full": ours("full"),
    "msprobe L0 statistics": msprobe("statistics"),
    "msprobe L0 tensor": msprobe("tensor"),
    "DebugMode with norms": debug_mode,
}


def serve(way: str, pipe: Connection) -> None:
    """One process: a captured step, timed, for each request."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
    ):
        step_of = WAYS[way](Training(Path(folder) / "trace"))
        while pipe.recv():
            step = step_of()
            start = time.process_time()
            step()
            pipe.send(time.process_time() - start)


def install() -> None:
    """Once; without its dependencies on plotting and ONNX, which capture does not load."""
    if not (PEERS / "msprobe").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(PEERS), MSPROBE]
        subprocess.run([*command, *_NEEDS], check=True, timeout=600)


def measured() -> dict[str, list[float]]:
    """By way, one ratio to the bare step for each round."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for way in WAYS:
        pipes[way], other = context.Pipe()
        processes.append(context.Process(target=serve, args=(way, other), daemon=True))
        processes[-1].start()
        other.close()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    chance = random.Random(0)
    for number in range(NUM_WARM_UPS + NUM_ROUNDS):
        seconds = {}
        for way in chance.sample(list(WAYS), len(WAYS)):
            pipes[way].send(True)
            if not pipes[way].poll(300):
                raise TimeoutError(f"{way} did not answer")
            seconds[way] = pipes[way].recv()
        if number >= NUM_WARM_UPS:
            for way in WAYS:
                found[way].append(seconds[way] / seconds["bare"])
    for way, process in zip(WAYS, processes, strict=True):
        pipes[way].send(False)
        process.join(30)
    return found


def main() -> int:
    install()
    found = {way: statistics.median(each) for way, each in measured().items() if way != "bare"}
    for way, ratio in found.items():
        print(f"{way:>22}: {ratio:.2f} times the CPU time of a bare step")
    most = max(ratio for way, ratio in found.items() if way.startswith("ttrace"))
    least = min(ratio for way, ratio in found.items() if not way.startswith("ttrace"))
    print(f"peers: TTrace's capture costs at most {most:.2f} bare steps, the others' at least {least:.2f} (bar: less)")
    return int(most >= least)
