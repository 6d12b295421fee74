"""Frameworks in the versions that people have, each with an example of its own."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from zoo.harness.torches.environment import OWN, ROOT, make_environment
from zoo.harness.torches.wheels import PYTHON
from zoo.harness.wheels import unpack
from zoo.versions.runs import Example

_TRANSFORMERS = (Example("transformers_tp.py", 0), Example("transformers_tp.py --bug", 1))
_MEGATRON = tuple(
    Example(
        f"megatron_gpt.py {options}",
        0,
        python="torchrun --standalone --nproc-per-node 1",
        rank="-m zoo.harness.megatron.script ",
    )
    for options in ("--tp 2 --sp", "--zero", "--pp 2")
)


@dataclass(frozen=True)
class Framework:
    """A version of a package, the Python that it needs, and what runs with it."""

    package: str
    version: str
    examples: tuple[Example, ...]
    python: str = PYTHON
    wheels: tuple[str, ...] = ()
    """What is put in front of the installed packages: itself, and what it needs in another version."""

    @property
    def name(self) -> str:
        return f"{self.package} {self.version}"


FRAMEWORKS = (
    Framework(
        "transformers",
        "4.57.6",
        _TRANSFORMERS,
        wheels=("transformers==4.57.6", "accelerate==1.12.0", "huggingface_hub==0.36.0", "tokenizers==0.22.1"),
    ),
    Framework("transformers", "5.22.2", _TRANSFORMERS),
    Framework("megatron-core", "0.16.1", _MEGATRON),
    Framework("megatron-core", "0.17.1", _MEGATRON, "3.12"),
    Framework("megatron-core", "0.18.2", _MEGATRON, "3.12"),
    Framework("megatron-core", "0.19.2", _MEGATRON, "3.12"),
)


@dataclass(frozen=True)
class Outcome:
    """What was measured of one version of a framework."""

    framework: str
    python: str
    torch: str
    examples: dict[str, int]
    """What each example ended with."""

    @property
    def unexpected(self) -> list[str]:
        [framework] = [known for known in FRAMEWORKS if known.name == self.framework]
        return [e.name for e in framework.examples if self.examples.get(e.name) != e.expect(self.torch)]


def measure_framework(framework: Framework) -> Outcome:
    variables = make_environment(framework.python, OWN)
    wheels = [unpack(wheel, f"{wheel}-{framework.python}", python=framework.python) for wheel in framework.wheels]
    paths = [ROOT, *wheels, variables["PYTHONPATH"]]
    variables |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TTRACE_MEGATRON": framework.version}
    if framework.wheels:
        variables["TTRACE_HIDDEN"] = "torchao"  # it is for the installed version
    with tempfile.TemporaryDirectory(prefix="ttrace-versions-") as folder:
        examples = {example.name: example.run(Path(folder), variables, OWN) for example in framework.examples}
    return Outcome(framework.name, framework.python, OWN, examples)
