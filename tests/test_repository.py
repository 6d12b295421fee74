"""Pinned packages are those that pyproject.toml asks for, and the GitHub Action does what its inputs say."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.commands import HOLDABLE, ROOT, SCRIPTS
from zoo.harness.limits import HANG

LOCK = ROOT / ".ci" / "requirements.txt"
SWEEP = """
reference = "{python} {folder}/train.py"
candidate = "{python} {folder}/train.py {{wrong}}"

[axes]
wrong = "wrong"
"""


def read_pins() -> dict[str, str]:
    """Return the version of each package that this Python would install."""
    lines = [line.removesuffix("\\") for line in LOCK.read_text().splitlines() if re.match(r"\w", line)]
    pins = [Requirement(line.strip()) for line in lines]
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }


def list_requirements() -> list[Requirement]:
    """List what the package and the group `dev` ask for, with the groups that `dev` includes."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    included = [groups[entry["include-group"]] for entry in groups["dev"] if isinstance(entry, dict)]
    texts = [*project["project"]["dependencies"], *groups["dev"], *(text for group in included for text in group)]
    return [Requirement(text) for text in texts if isinstance(text, str)]


def test_pinned_versions_fit_what_is_asked_for() -> None:
    pins = read_pins()
    assert "torch" not in pins
    wanted = [requirement for requirement in list_requirements() if requirement.name != "torch"]
    missing = [str(r) for r in wanted if canonicalize_name(r.name) not in pins]
    assert not missing, ".ci/lock pins them"
    assert not [str(r) for r in wanted if not r.specifier.contains(pins[canonicalize_name(r.name)], prereleases=True)]


def test_every_pin_has_a_hash_and_no_index_is_named() -> None:
    text = LOCK.read_text()
    pins = re.split(r"\n(?=\w)", text)[1:]
    assert len(pins) > 100
    assert not [pin for pin in pins if "--hash=sha256:" not in pin]
    assert not re.search(r"https?:|--(?:extra-)?index|--find-links", text)


@pytest.mark.slow
def test_the_action_sweeps_and_gives_the_condition(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HOLDABLE)
    (tmp_path / "part.py").write_text("SIZE = 16\n")
    file = tmp_path / "sweep; touch owned $(touch owned).toml"  # a name that a shell must not read
    file.write_text(SWEEP.format(python=sys.executable, folder=tmp_path))
    action = importlib.import_module("yaml").safe_load((ROOT / "action.yml").read_text())
    (step,) = [step for step in action["runs"]["steps"] if step.get("id") == "sweep"]
    given = {"file": str(file), "out": str(tmp_path / "out"), "max-ranks": "2"}
    variables = {
        name: given.get(match[1], action["inputs"][match[1]].get("default"))
        for name, value in step["env"].items()
        if (match := re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", value))
    }
    assert variables.keys() == step["env"].keys()
    assert "${{" not in step["run"]
    environment = {**os.environ, **variables, "GITHUB_OUTPUT": str(tmp_path / "output")}
    environment["PATH"] = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(
        shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "output").read_text() == "condition=fails iff wrong\n"
    assert (tmp_path / "out" / "sweep.html").exists()
    assert not (tmp_path / "owned").exists()
