"""The first minute: `ttrace demo` from the built wheel, in an empty folder and a new environment."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from zoo.harness.torches.environment import OWN, ROOT, find_python
from zoo.harness.torches.wheels import IN_CI, PYTHON, unpack_torch
from zoo.versions.runs import run

CELLS = ((PYTHON, OWN), ("3.12", OWN), ("3.13", OWN), *((PYTHON, torch) for torch in IN_CI))
VERDICTS = ("✓ every tensor agrees", "✗ tokens.weight/param_grad is the first wrong tensor")


@dataclass(frozen=True)
class Demo:
    """What `ttrace demo` did with one Python and one torch."""

    python: str
    torch: str
    exit: int
    has_both_verdicts: bool
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.exit == 0 and self.has_both_verdicts


def build_wheel(folder: Path) -> Path:
    """Build the wheel for this machine as a release does."""
    name = f"manylinux_2_17_{platform.machine()}"
    subprocess.run([ROOT / ".ci" / "wheels", folder, name], check=True, capture_output=True)
    [wheel] = folder.glob(f"*{name}.whl")
    return wheel


def measure_demo(python: str, torch: str, wheel: Path) -> Demo:
    """Install the wheel into a new environment, and run the demo; print what it said if that is not good."""
    interpreter = find_python(python)
    if interpreter is None:
        raise FileNotFoundError(f"there is no Python {python} on PATH")
    with tempfile.TemporaryDirectory(prefix="ttrace-demo-") as scratch:
        folder, venv = Path(scratch, "empty"), Path(scratch, "venv")
        folder.mkdir()
        subprocess.run([interpreter, "-m", "venv", venv], check=True)
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        # pip takes this torch as installed: another would bring gigabytes of CUDA libraries.
        variables |= {"PYTHONPATH": str(unpack_torch(torch, python)), "PATH": f"{venv}/bin{os.pathsep}{os.defpath}"}
        subprocess.run(["pip", "install", "--quiet", wheel], check=True, env=variables, executable=venv / "bin" / "pip")
        start = time.monotonic()
        status, output = run([str(venv / "bin" / "ttrace"), "demo"], variables, folder)
        seconds = round(time.monotonic() - start, 1)
    demo = Demo(python, torch, status, all(verdict in output for verdict in VERDICTS), seconds)
    if not demo.is_good:
        print(output, flush=True)
    return demo
