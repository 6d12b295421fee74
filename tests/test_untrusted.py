"""Texts of others, in every place where they are shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.commands import ttrace
from tests.support.small_runs import RANK, change_document, write_run
from ttrace.layouts.ids import Kind, Site, encode_name
from ttrace.untrusted import HIDDEN, clean_line, clean_text, find_free_memory

EVIL = "note\n::error file=x::INJECTED\x1b[2J\x1b]52;c;cHduZWQ=\x07 \u202egnp.exe ##[error]INJECTED </script><script>"


@given(st.text())
def test_nothing_hidden_is_left(text: str) -> None:
    assert not HIDDEN.search(clean_text(text))
    line = clean_line(text)
    assert len(line.splitlines()) <= 1
    assert clean_line(line) == line
    assert Site(encode_name(text) or "x", Kind.OUTPUT)
    assert not re.search(r"(?m)^\s*::|##\[", clean_text(text))


def test_ordinary_text_stays_as_it_is() -> None:
    text = "größe.重み 5 · 10⁻³ „ja“\n\tb"
    assert clean_text(text) == text
    assert clean_line(text) == "größe.重み 5 · 10⁻³ „ja“ b"


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["for people", "for programs"])
def test_a_hostile_note_commands_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str]) -> None:
    run = write_run(tmp_path / "run", wrong=True)
    module = {"type": EVIL, "source": EVIL}
    for folder in (run.reference, run.candidate):
        for path in folder.glob("rank-*/manifest.json"):
            change_document(path, notes=[EVIL], modules={"fc1": module, "fc2": module}, versions={EVIL: EVIL})
    change_document(run.candidate / RANK / "end.json", notes=[EVIL])
    change_document(run.folder / "run.json", candidate=EVIL)
    summary, junit = tmp_path / "summary.md", tmp_path / "junit.xml"
    summary.touch()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    done = ttrace("check", str(run.folder), "--junit", str(junit), *flags)
    assert done.returncode == 1, done.stderr
    for line in done.stdout.splitlines():
        assert not re.match(r"\s*::|.*##\[", line), line
    for line in done.stderr.splitlines():
        assert not re.match(r"\s*::(?!error )|\s*::error file=x|.*##\[", line), line
    page = (run.folder / "report.html").read_text()
    for text in (done.stdout, done.stderr, summary.read_text(), junit.read_text(), page):
        assert not HIDDEN.search(text)
    for text in (done.stdout, page):
        assert not re.search(r"\\u(001b|202e|0007)", text)
    assert "</script><script>" not in page
    if flags:
        assert "INJECTED" in json.dumps(json.loads(done.stdout))


MIB = 1 << 20
V2 = ("0::/jobs/train", "", ("memory.max", "memory.current", "inactive_file"))
V1 = (
    "9:name=systemd:/\n4:cpu,memory:/jobs/train\n0::/",
    "memory",
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       8192 kB\nMemAvailable:   4096 kB\n")
    return path


def write_group(folder: Path, names: tuple[str, str, str], limit: str) -> None:
    """A group that uses 2 MiB, of which the kernel can take back one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{2 * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {MIB}\n")


def test_without_groups_the_machine_counts(tmp_path: Path, memory: Path) -> None:
    assert find_free_memory(memory, tmp_path / "none", tmp_path) == 4 * MIB
    assert find_free_memory(tmp_path / "none", tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("own", "root", "free"),
    [
        (str(3 * MIB), "max", 2 * MIB),  # its own limit
        ("max", str(2 * MIB), MIB),  # that of the group around it, as in a container
        (str(1 << 62), str(1 << 62), 4 * MIB),  # none that matters
        (str(MIB // 2), "max", 0),  # more is used than it may
    ],
)
def test_the_smallest_group_counts(
    tmp_path: Path, memory: Path, version: tuple[str, str, tuple[str, str, str]], own: str, root: str, free: int
) -> None:
    line, folder, names = version
    own_groups = tmp_path / "cgroup"
    own_groups.write_text(line)
    write_group(tmp_path / "groups" / folder, names, root)
    write_group(tmp_path / "groups" / folder / "jobs" / "train", names, own)
    assert find_free_memory(memory, own_groups, tmp_path / "groups") == free


def test_what_this_machine_has_free_is_found() -> None:
    free = find_free_memory()
    assert free is None or free > MIB
