"""Rows: each is an unchanged script of a framework in one layout, with bugs that can be planted in it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from zoo.harness.torches.environment import ROOT
from zoo.harness.with_wheels import run_on

SCRIPTS = Path("zoo/frameworks/scripts")
TORCHRUN = "torchrun --standalone --nproc-per-node 2"
OPTIONS = ("--twins", "1", "--no-repeat", "--no-isolate")
"""One twin gives the tolerance; the rest would only describe the bugs further."""


@dataclass(frozen=True)
class Row:
    """A framework in a layout, and how its script is started on both sides."""

    framework: str
    package: str
    """The package that has it, and whose version the page names."""
    layout: str
    script: str
    bugs: tuple[str, ...]
    """Values of the script's `--bug`, which only the candidate gets."""
    reference: str = ""
    """Arguments of the script on each side."""
    candidate: str = ""
    launcher: str = TORCHRUN
    is_in_ci: bool = False
    """Whether .ci/run checks this row: one for each framework."""
    wheels: tuple[str, ...] = ()
    """Packages that are not installed with this project, unpacked for both sides."""

    @property
    def name(self) -> str:
        return f"{self.framework}, {self.layout}"

    def make_command(self, out: Path, bug: str = "") -> list[str]:
        """Make the command that checks the script, with a bug if one is given."""
        path, planted = f"{run_on(self.wheels)}{SCRIPTS}/{self.script}", f"--bug {bug}" if bug else ""
        reference = f"python {path} {self.reference}".rstrip()
        candidate = " ".join(filter(None, (self.launcher, path, self.candidate, planted)))
        sides = ("--reference", reference, "--candidate", candidate)
        return [sys.executable, "-m", "ttrace", "run", *OPTIONS, "--out", str(out), *sides]

    @property
    def version(self) -> str:
        """The version of the package."""
        unpacked = dict(wheel.split("==") for wheel in self.wheels)
        return unpacked.get(self.package) or version(self.package)

    def count_added_lines(self) -> int:
        """Count the lines of the script that mention TTrace."""
        return sum("ttrace" in line.lower() for line in (ROOT / SCRIPTS / self.script).read_text().splitlines())


_TRAINER = ("transformers Trainer", "transformers")
_DEEPSPEED = ("DeepSpeed", "deepspeed")
_ACCELERATE = ("Accelerate", "accelerate")
_LIGHTNING = ("Lightning Trainer", "lightning")
_FABRIC = ("Lightning Fabric", "lightning")
_TITAN = ("torchtitan", "torchtitan")
TITAN = (
    "torchtitan==0.3.0",
    "spmd_types==0.2.3",
    "torchdata==0.11.0",
    "torch_checkpointing==0.1.1",
    "tyro==1.0.16",
    "docstring_parser==0.18.0",
    "typeguard==4.6.0",
    "shtab==1.13.0",
    "einops==0.8.2",
)
TYPED = ("torch==2.15.0", *TITAN)
"""In torch 2.13, FSDP2 takes no parameters whose layout spmd_types keeps."""
_DTENSOR = "--backend partial_dtensor"

ROWS = (
    Row(*_TRAINER, "DDP, accumulation, labels with -100", "trainer.py", ("items", "eps"), is_in_ci=True),
    Row(*_TRAINER, "DDP, label smoothing", "trainer.py", ("items",), "--smooth", "--smooth"),
    Row(*_TRAINER, "FSDP2, accumulation, labels with -100", "trainer.py", ("eps",), "", "--fsdp"),
    Row(*_TRAINER, "DeepSpeed ZeRO-2, labels with -100", "trainer.py", ("items",), "", "--zero 2"),
    Row(*_TRAINER, "DeepSpeed ZeRO-3, labels with -100", "trainer.py", ("eps",), "", "--zero 3"),
    Row("TRL SFTTrainer", "trl", "DDP, labels of completions", "sft.py", ("loss",), is_in_ci=True),
    Row("PEFT LoRA", "peft", "DDP, accumulation", "lora.py", ("scaling",), is_in_ci=True),
    Row(*_ACCELERATE, "DDP, accumulation", "accelerate_loop.py", ("accumulation",), is_in_ci=True),
    Row(*_ACCELERATE, "FSDP2, accumulation", "accelerate_loop.py", ("eps",), "", "--fsdp"),
    Row(*_LIGHTNING, "DDP, automatic optimisation", "lightning_trainer.py", ("loss",), is_in_ci=True),
    Row(*_LIGHTNING, "DDP, manual optimisation", "lightning_trainer.py", ("loss",), "--manual", "--manual"),
    Row(*_LIGHTNING, "FSDP2, automatic optimisation", "lightning_trainer.py", ("eps",), "", "--fsdp"),
    Row(*_FABRIC, "DDP", "fabric_loop.py", ("sync",), is_in_ci=True),
    Row(*_FABRIC, "FSDP2", "fabric_loop.py", ("eps",), "", "--fsdp"),
    Row(*_DEEPSPEED, "ZeRO-0, accumulation, clipping", "deepspeed_zero.py", ("loss",), "", "--stage 0"),
    Row(*_DEEPSPEED, "ZeRO-1, accumulation, clipping", "deepspeed_zero.py", ("accumulation",), "", "--stage 1"),
    Row(*_DEEPSPEED, "ZeRO-2, accumulation, clipping", "deepspeed_zero.py", ("loss",), "", "--stage 2"),
    Row(*_DEEPSPEED, "ZeRO-3, accumulation, clipping", "deepspeed_zero.py", ("eps",), "", "--stage 3", is_in_ci=True),
    Row(*_DEEPSPEED, "ZeRO-2, bf16", "deepspeed_zero.py", ("loss",), "--stage 1 --bf16", "--stage 2 --bf16"),
    Row(*_DEEPSPEED, "ZeRO-3, bf16", "deepspeed_zero.py", ("eps",), "--stage 1 --bf16", "--stage 3 --bf16"),
    Row("Ray Train", "ray", "DDP", "ray_train.py", ("unprepared",), "1", "2", launcher="python", is_in_ci=True),
    Row(*_TITAN, "FSDP2", "titan.py", ("eps",), _DTENSOR, f"{_DTENSOR} --dp 2", wheels=TITAN),
    Row(*_TITAN, "tensor and sequence parallel", "titan.py", ("eps",), _DTENSOR, f"{_DTENSOR} --tp 2", wheels=TITAN),
    Row(*_TITAN, "FSDP2, DTensors alone", "titan.py", ("eps",), "", "--backend full_dtensor --dp 2", wheels=TITAN),
    Row(*_TITAN, "pipeline, spmd_types", "titan.py", ("eps",), "", "--pp 2", wheels=TYPED),
    Row(
        *_TITAN,
        "tensor and sequence parallel, spmd_types",
        "titan.py",
        ("eps",),
        "",
        "--tp 2",
        is_in_ci=True,
        wheels=TYPED,
    ),
    Row(
        *_TITAN, "FSDP2, chunked loss, spmd_types", "titan.py", ("eps",), "--chunked", "--chunked --dp 2", wheels=TYPED
    ),
    Row(
        *_TITAN,
        "context parallel, chunked loss, spmd_types",
        "titan.py",
        ("eps",),
        "--chunked --length 256",
        "--chunked --length 256 --cp 2",
        wheels=TYPED,
    ),
)
