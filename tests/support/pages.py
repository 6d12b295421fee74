"""Reader of the docs' pages, who does what they tell a reader to do."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from zoo.harness.limits import HANG

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
INSTALL = "pip install ."
"""README's first command, which tests/test_install.py runs; the other tests' environment has run it already."""
_FENCE = re.compile(r"^```(?P<language>\w*)(?P<rest>[^\n]*)\n(?P<text>.*?)^```$", re.S | re.M)
_TITLE = re.compile(r'title="(?P<title>[^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the name of the file to save it as, and its text."""

    language: str
    title: str
    text: str


@dataclass(frozen=True)
class Ran:
    """The result of a command."""

    status: int
    output: str
    seconds: float
    """CPU seconds of the command: other work of the machine does not count."""


def blocks(page: Path) -> list[Block]:
    found = []
    for fence in _FENCE.finditer(page.read_text()):
        title = _TITLE.search(fence["rest"])
        found.append(Block(fence["language"], title["title"] if title else "", fence["text"]))
    return found


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """List the commands that a page tells to type, each with the lines it shows."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks(page):
        for line in block.text.splitlines() if block.language == "console" else ():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


def fits(shown: list[str], printed: list[str]) -> bool:
    """Whether the shown lines are printed in this order; `...` stands for any number of lines."""
    rest = iter(printed)
    return all(line == "..." or any(line.rstrip() == found.rstrip() for found in rest) for line in shown)


def is_part_of(fragment: str, text: str) -> bool:
    """Whether a text has the lines of a fragment in this order, at any indentation; comments and `...` are ignored."""
    rest = iter(_code(text))
    return all(any(line == found for found in rest) for line in _code(fragment) if line != "...")


def _code(text: str) -> list[str]:
    lines = (line.partition("  # ")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("# ")]


@dataclass
class Reader:
    """A reader in a folder with the examples, who types each command once, even if several pages tell it.

    The folder is removed from paths in the output, as the pages show them.
    """

    folder: Path
    ran: dict[str, Ran] = field(default_factory=dict)

    def follow(self, page: Path) -> list[tuple[str, list[str], Ran]]:
        """Save the files of a page and run its commands, in order."""
        for block in blocks(page):
            if block.title:
                (self.folder / block.title).write_text(block.text)
        return [(command, shown, self.run(command)) for command, shown in commands(page)]

    def run(self, command: str) -> Ran:
        if command not in self.ran:
            start = _children()
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env={**os.environ, "COLUMNS": "100"},
                capture_output=True,
                text=True,
                timeout=HANG,
                check=False,
            )
            output = done.stdout if done.returncode in (0, 1) else done.stdout + done.stderr
            self.ran[command] = Ran(done.returncode, output.replace(f"{self.folder}/", ""), _children() - start)
        return self.ran[command]


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system
