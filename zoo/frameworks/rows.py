"""Rows: each is an unchanged script of a framework in one layout, with bugs that can be planted in it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from zoo.harness.torches.environment import ROOT

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

    @property
    def name(self) -> str:
        return f"{self.framework}, {self.layout}"

    def make_command(self, out: Path, bug: str = "") -> list[str]:
        """Make the command that checks the script, with a bug if one is given."""
        path, planted = f"{SCRIPTS}/{self.script}", f"--bug {bug}" if bug else ""
        reference = f"python {path} {self.reference}".rstrip()
        candidate = " ".join(filter(None, (self.launcher, path, self.candidate, planted)))
        sides = ("--reference", reference, "--candidate", candidate)
        return [sys.executable, "-m", "ttrace", "run", *OPTIONS, "--out", str(out), *sides]

    def count_added_lines(self) -> int:
        """Count the lines of the script that mention TTrace."""
        return sum("ttrace" in line.lower() for line in (ROOT / SCRIPTS / self.script).read_text().splitlines())


_TRAINER = ("transformers Trainer", "transformers")
_ACCELERATE = ("Accelerate", "accelerate")
_LIGHTNING = ("Lightning Trainer", "lightning")
_FABRIC = ("Lightning Fabric", "lightning")

ROWS = (
    Row(*_TRAINER, "DDP, accumulation, labels with -100", "trainer.py", ("items", "eps"), is_in_ci=True),
    Row(*_TRAINER, "DDP, label smoothing", "trainer.py", ("items",), "--smooth", "--smooth"),
    Row(*_TRAINER, "FSDP2, accumulation, labels with -100", "trainer.py", ("eps",), "", "--fsdp"),
    Row("TRL SFTTrainer", "trl", "DDP, labels of completions", "sft.py", ("loss",), is_in_ci=True),
    Row("PEFT LoRA", "peft", "DDP, accumulation", "lora.py", ("scaling",), is_in_ci=True),
    Row(*_ACCELERATE, "DDP, accumulation", "accelerate_loop.py", ("accumulation",), is_in_ci=True),
    Row(*_ACCELERATE, "FSDP2, accumulation", "accelerate_loop.py", ("eps",), "", "--fsdp"),
    Row(*_LIGHTNING, "DDP, automatic optimisation", "lightning_trainer.py", ("loss",), is_in_ci=True),
    Row(*_LIGHTNING, "DDP, manual optimisation", "lightning_trainer.py", ("loss",), "--manual", "--manual"),
    Row(*_LIGHTNING, "FSDP2, automatic optimisation", "lightning_trainer.py", ("eps",), "", "--fsdp"),
    Row(*_FABRIC, "DDP", "fabric_loop.py", ("sync",), is_in_ci=True),
    Row(*_FABRIC, "FSDP2", "fabric_loop.py", ("eps",), "", "--fsdp"),
    Row("Ray Train", "ray", "DDP", "ray_train.py", ("unprepared",), "1", "2", launcher="python", is_in_ci=True),
)
