"""Safe access to untrusted files and texts.

A trace, a run or a settings file may come from anyone. Its size, depth and numbers are limited, so that it cannot use
all memory or time: `--limits 10`, or TTRACE_LIMITS=10, makes all limits ten times as large.
docs/explanation/security.md has the details.

Only regular files are read, and none outside of the given folder: a link could lead to any file, and a pipe or a device
would never end. What is written is a new file that is moved into place, so a link is replaced, and its target is
unchanged.

Names and notes may contain any characters, and are shown in terminals, logs and pages, so they are sanitised.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ttrace.errors import TTraceError

LIMITS_VARIABLE = "TTRACE_LIMITS"
_Settings = TypeVar("_Settings")
MOST = (1 << 63) - 1
"""The largest number in a trace, which torch and safetensors can represent."""


@dataclass(frozen=True)
class Limits:
    """Limits of what is read."""

    document_bytes: int = 256 << 20
    """A JSON document: a manifest, an end, an index, a report."""
    settings_bytes: int = 4 << 20
    """A settings file: rules, a policy, a sweep, a map of names, a baseline."""
    lines_bytes: int = 4 << 30
    """The records, or the collectives, of one rank."""
    depth: int = 100
    """The nesting depth of lists and tables."""
    digits: int = 400
    """The number of digits of a number."""
    num_ranks: int = 1 << 20
    """The number of ranks of a run."""

    @classmethod
    def get(cls) -> Limits:
        """Return the limits of this process."""
        return _make(os.environ.get(LIMITS_VARIABLE, "1"))


@lru_cache(maxsize=8)
def _make(factor: str) -> Limits:
    if not (factor.isascii() and factor.isdecimal() and 0 < len(factor) < 7 and int(factor)):
        raise TTraceError(f"{LIMITS_VARIABLE}={factor}: it must be a whole number of at least 1, for instance 10.")
    return Limits(**{name: limit * int(factor) for name, limit in vars(Limits()).items()})


def refuse_more(where: object, what: str, found: int, most: int) -> None:
    """Raise an error for a number beyond a limit, with a sentence on how to raise the limit."""
    if found > most:
        raise TTraceError(
            f"{where}: {what} is {found:,}, but at most {most:,} is read. If you trust it: ttrace --limits 10, or "
            f"{LIMITS_VARIABLE}=10."
        )


def check_memory(what: object, num_bytes: int) -> None:
    """Raise an error if values do not fit into free memory: a few bytes of a trace can request any number of values."""
    free = find_free_memory()
    if free is not None and num_bytes > free:
        raise TTraceError(
            f"{what}: its values take {num_bytes / 2**30:,.1f} GiB, but only {free / 2**30:,.1f} GiB of memory is "
            "free. Use a larger machine, or trace again with --record sketch."
        )


def parse_json(text: str, where: object) -> Any:
    """Parse a JSON document of others; raise ValueError or TTraceError if it is none, or beyond the limits."""
    limits = Limits.get()
    refuse_more(where, "its size in bytes", len(text), limits.document_bytes)
    try:
        found = json.loads(text, parse_int=lambda digits: _parse_int(digits, limits))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(found, where, limits)
    return found


def parse_toml(text: str, where: object) -> dict[str, Any]:
    """Parse a TOML file of others; raise ValueError or TTraceError if it is none, or beyond the limits."""
    limits = Limits.get()
    refuse_more(where, "its size in bytes", len(text), limits.settings_bytes)
    import tomllib  # here, because every launched process imports this module and most read no TOML

    # Keys such as a.a.a.a make nested tables.
    longest = max((line.count(".") + line.count("[") for line in text.splitlines()), default=0)
    if longest > 100 * limits.depth:
        raise ValueError("it is nested too deeply")
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(found, where, limits)
    return found


def _parse_int(digits: str, limits: Limits) -> int:
    if len(digits) > limits.digits:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _check_depth(found: Any, where: object, limits: Limits) -> None:
    """Raise an error for too deep nesting, level by level, because recursion would raise RecursionError."""
    level, depth = [found], 0
    while level:
        refuse_more(where, "its depth", depth, limits.depth)
        depth += 1
        level = [
            inner
            for each in level
            if isinstance(each, (Mapping, list))
            for inner in (each.values() if isinstance(each, Mapping) else each)
            if isinstance(inner, (Mapping, list))
        ]


_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | os.O_CLOEXEC
_LAST_STANDARD = 2
_MOST_WRONG_KEYS = 3
"""A message names no more of them: a hostile file may have any number."""
_CREATE = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def open_regular(path: Path) -> int:
    """Open a file to read; raise OSError if it is no regular file: a pipe would wait, a device never end."""
    file = os.open(path, _READ)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path} is no regular file")
    except BaseException:
        os.close(file)
        raise
    return file


def read_file(path: Path, most: int | None = None) -> bytes:
    """Read a regular file of at most so many bytes; by default, as many as a JSON document may have."""
    most = Limits.get().document_bytes if most is None else most
    with os.fdopen(open_regular(path), "rb") as file:
        refuse_more(path, "its size in bytes", os.fstat(file.fileno()).st_size, most)
        return file.read()


def read_text(path: Path, most: int | None = None) -> str:
    """Do the same for text in UTF-8; raise UnicodeDecodeError if it is none."""
    return read_file(path, most).decode()


def load_settings(
    what: str,
    path: Path,
    validate: Callable[[Any], _Settings],
    *,
    advice: str,
    parse: Callable[[str, object], Any] = parse_toml,
    error_type: type[TTraceError] = TTraceError,
) -> _Settings:
    """Load a file that a user wrote: rules, a policy, a sweep, a map of names or a baseline.

    `validate` turns the parsed file into settings, and raises ValueError if it cannot. A file that cannot be used is
    refused with one sentence for all of these files, and with `advice`, which describes what the file needs.
    """
    try:
        return validate(parse(read_text(path, Limits.get().settings_bytes), path))
    except (OSError, ValueError, RecursionError) as error:
        raise error_type(f"cannot read the {what} file {path}: {_describe_error(error)}. {advice}") from None


def _describe_error(error: Exception) -> str:
    """Describe what is wrong with a file, in one line."""
    if not hasattr(error, "errors"):
        return str(error)
    # The text of pydantic's ValidationError spans several lines for each wrong key. pydantic is not imported here,
    # because `import ttrace` must stay cheap.
    wrong = error.errors()[:_MOST_WRONG_KEYS]
    return "; ".join(f"{'.'.join(map(str, key['loc']))}: {key['msg']}".removeprefix(": ") for key in wrong)


def check_inside(path: Path, folder: Path) -> None:
    """Raise an error for a path that leads out of the folder through links."""
    if not path.is_symlink() and path.parent == folder:
        return
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(folder)):
        raise TTraceError(
            f"{path} is a link to {real}, outside of {folder}. Links out of a run are not followed: copy the target, "
            "or name that folder itself."
        )


def create_file(path: Path, access: int = os.O_WRONLY) -> int:
    """Create a file, and replace an existing one of this name.

    Its descriptor is never that of a standard stream: a script may have closed these, and libraries write to them.
    """
    path.unlink(missing_ok=True)
    file = os.open(path, access | _CREATE, 0o666)
    if file > _LAST_STANDARD:
        return file
    try:
        return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _LAST_STANDARD + 1)
    finally:
        os.close(file)


def replace_file(path: Path, data: str | bytes, *, is_synced: bool = False) -> None:
    """Write a new file and move it into place: readers get the old or the new file, and links are not followed."""
    temporary = path.with_name(f".{path.name[:100]}.{os.urandom(4).hex()}.tmp")
    text = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | _CREATE, 0o666), "wb") as file:
            file.write(text)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        if is_synced:
            _sync_folder(path.parent)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_named(path: Path, data: str | bytes) -> None:
    """Write to a path that a user gave: links are followed, and /dev/stdout is written to instead of replaced."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_bytes(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)
    else:
        replace_file(path, data)


def _sync_folder(folder: Path) -> None:
    """Flush earlier changes of the folder to the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, escape sequences among them; not tab and newline
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"  # characters without width
    "\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # other newlines, and characters that change the direction of text
    "\ud800-\udfff\ufffe\uffff\U000e0000-\U000e0fff"  # surrogates, and tags
)
HIDDEN = re.compile(f"[{_HIDDEN}]")
"""Invisible characters that change how a text is shown."""
_COMMAND = re.compile(r"^([ \t]*):(?=:)|##(?=\[)", re.MULTILINE)
"""The beginning of a command in the logs of GitHub's and other runners."""


def clean_text(text: str) -> str:
    """Replace characters that could deceive a reader, or control a terminal or the runner of a log; newlines stay."""
    text = text if text.isascii() and text.isprintable() else HIDDEN.sub("?", text)
    return _COMMAND.sub(lambda match: f"{match[0]} ", text) if "::" in text or "##[" in text else text


def clean_line(text: str) -> str:
    """Clean a text as `clean_text` does, and join its lines."""
    return clean_text(
        text
        if text.isascii() and text.isprintable()
        else " ".join(part for part in re.split(r"[\t\n\r]+", text) if part)
    )


_MEMORY = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_FILES = {
    "v2": ("memory.max", "memory.current", "inactive_file"),
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""For each version of control groups: the files with the limit and the usage, and the entry for reclaimable memory."""


def find_free_memory(memory: Path = _MEMORY, own_groups: Path = _OWN_GROUPS, groups: Path = _GROUPS) -> int | None:
    """Return the number of free bytes; None if the system does not report it."""
    try:
        entries = dict(line.split(":", 1) for line in memory.read_text(encoding="ascii").splitlines())
        free = int(entries["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, LookupError):
        return None
    return min([free, *_list_left(own_groups, groups)])


def _list_left(own_groups: Path, groups: Path) -> list[int]:
    """List the free bytes of each control group of this process."""
    try:
        lines = [line.split(":", 2) for line in own_groups.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    left: list[int] = []
    for _, controllers, path in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        version, root = ("v1", groups / "memory") if controllers else ("v2", groups)
        # In a container its own group is the root, and the path may refer to the outside.
        inner = root / path.lstrip("/")
        folders = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
        per_group = [_find_left(folder, *_FILES[version]) for folder in folders]
        left += [each for each in per_group if each is not None]
    return left


def _find_left(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    try:
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        used = int((folder / usage).read_text(encoding="ascii")) - int(statistics[cached])
        return max(0, int((folder / limit).read_text(encoding="ascii")) - used)
    except (OSError, ValueError, LookupError):  # "max": no limit
        return None
