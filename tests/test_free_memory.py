from __future__ import annotations

from pathlib import Path

import pytest

from ttrace.free_memory import find_free_memory

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
