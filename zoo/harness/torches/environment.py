"""Environments in which one version of Python runs one version of torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ttrace.compat.torch import parse_release
from zoo.harness.torches.wheels import PYTHON, unpack_torch
from zoo.harness.wheels import find_cache

ROOT = Path(__file__).parents[3]
OWN = "2.13.0"
"""The torch that is installed beside this, a build for CPU."""
NEWER = {"torchao": (2, 11)}
"""Installed packages, and the oldest torch that they work with; transformers imports them where it finds them."""


def make_environment(python: str, torch: str) -> dict[str, str]:
    """Return the variables under which `python`, `torchrun` and `ttrace` on PATH are of these versions.

    Another torch is put in front of the installed one. Another Python has an environment of its own in the cache, with
    everything installed but torch.
    """
    variables = dict(os.environ, OMP_NUM_THREADS="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # every process would compile torch again, for seconds
    is_own = (python, torch) == (PYTHON, OWN)
    paths = [ROOT / "src", Path(__file__).parent / "hiding", *([] if is_own else [unpack_torch(torch, python)])]
    variables["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    variables["TTRACE_HIDDEN"] = " ".join(name for name, oldest in NEWER.items() if parse_release(torch) < oldest)
    folder = Path(sys.executable).parent if python == PYTHON else _make_venv(python, variables) / "bin"
    variables["PATH"] = f"{folder}{os.pathsep}{variables['PATH']}"
    return variables


def find_python(version: str) -> str | None:
    """Find an interpreter on PATH, or one that pyenv has; a shim of pyenv may lead nowhere."""
    kept = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, kept)):
        if candidate and subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def _make_venv(python: str, variables: dict[str, str]) -> Path:
    """Return an environment with all dependencies of this checkout; pip takes torch as installed, by its folder."""
    wanted = (ROOT / "pyproject.toml").read_bytes()
    folder = find_cache() / f"venv-{python}-{hashlib.sha256(wanted).hexdigest()[:8]}"
    if not (folder / "complete").exists():
        interpreter = find_python(python)
        if interpreter is None:
            raise FileNotFoundError(f"there is no Python {python} on PATH")
        subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True, env=variables)
        subprocess.run([*pip, "--editable", ".", "--group", "dev"], check=True, cwd=ROOT, env=variables)
        _write_torchrun(folder / "bin")
        (folder / "complete").touch()
    return folder


def _write_torchrun(folder: Path) -> None:
    """The script that pip would have written, had it installed torch."""
    script = folder / "torchrun"
    script.write_text(f"#!{folder / 'python'}\nimport sys\nfrom torch.distributed.run import main\nsys.exit(main())\n")
    script.chmod(0o755)
