"""The command by which README installs TTrace, in a copy of the checkout and a new virtual environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import ttrace
from tests.support.pages import INSTALL, README, ROOT, commands
from zoo.harness.limits import HANG

OFFLINE = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""Nothing is downloaded. `0` is how pip's variable switches build isolation off."""


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, cwd=folder, env=environment, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_readmes_command_installs_a_checkout(tmp_path: Path) -> None:
    """100 s on two cores that others use: the kernels are compiled."""
    assert INSTALL in [command for command, _ in commands(README)]
    checkout = tmp_path / "checkout"
    unneeded = shutil.ignore_patterns(".*", "__pycache__", "*.so", "build", "dist", "runs", "site")
    shutil.copytree(ROOT, checkout, ignore=unneeded)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=HANG)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # torch and hatchling are those of this Python. `--system-site-packages` would give those of the system's.
    (site / "parent.pth").write_text(sysconfig.get_path("purelib"))
    path = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**inherited, "PATH": path, **OFFLINE}
    run(INSTALL, checkout, environment)
    assert run("ttrace --version", tmp_path, environment).strip() == ttrace.__version__
    where = run("python -c 'import ttrace; print(ttrace.__file__)'", tmp_path, environment)
    assert Path(where.strip()).is_relative_to(site)
