"""How much memory is free: that of the machine, or what the control group of a container leaves of it."""

from __future__ import annotations

from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_FILES = {
    "v2": ("memory.max", "memory.current", "inactive_file"),
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By version of control groups, the files with the limit and the usage, and what of the usage the kernel takes back."""


def find_free_memory(memory: Path = _MEMORY, own_groups: Path = _OWN_GROUPS, groups: Path = _GROUPS) -> int | None:
    """Find how many bytes are free; None if the system does not say."""
    try:
        entries = dict(line.split(":", 1) for line in memory.read_text(encoding="ascii").splitlines())
        free = int(entries["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, LookupError):
        return None
    return min([free, *_list_left(own_groups, groups)])


def _list_left(own_groups: Path, groups: Path) -> list[int]:
    """List what each group that this process is in has left."""
    try:
        lines = [line.split(":", 2) for line in own_groups.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    left: list[int] = []
    for _, controllers, path in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        version, root = ("v1", groups / "memory") if controllers else ("v2", groups)
        # A container sees its own group as the root, whatever its path is outside.
        inner = root / path.lstrip("/")
        folders = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
        found = [_find_left(folder, *_FILES[version]) for folder in folders]
        left += [each for each in found if each is not None]
    return left


def _find_left(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    try:
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        used = int((folder / usage).read_text(encoding="ascii")) - int(statistics[cached])
        return max(0, int((folder / limit).read_text(encoding="ascii")) - used)
    except (OSError, ValueError, LookupError):  # "max": no limit
        return None
