"""Files of others: only regular ones are read, none outside of the folder that was named, and none is overwritten.

A run's folder may come from anybody. A link in it could lead to any file of ours, and a pipe or a device would never
end. So what is read is looked at first, and what is written is a new file that is moved into place: a link that was
there is replaced, and what it led to stays as it was.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from pathlib import Path

from ttrace.errors import TTraceError
from ttrace.untrusted import Limits, refuse_more

_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | os.O_CLOEXEC
_LAST_STANDARD = 2
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


def read_settings(path: Path) -> str:
    """Read a file that people write."""
    return read_text(path, Limits.get().settings_bytes)


def check_inside(path: Path, folder: Path) -> None:
    """Refuse a path that links lead out of the folder."""
    if not path.is_symlink() and path.parent == folder:
        return
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(folder)):
        raise TTraceError(
            f"{path} is a link to {real}, outside of {folder}. Links out of a run are not followed: copy what it links "
            "to, or name that folder itself."
        )


def create_file(path: Path, access: int = os.O_WRONLY) -> int:
    """Open a new file in place of whatever has this name.

    It gets no number of the standard files: a script may have closed those, and libraries use them.
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
    """Write a new file and move it into place: a reader sees the old one or the new one, and no link is followed."""
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
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
    """Write where a user said: a link is theirs, and /dev/stdout is no file to replace."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_bytes(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)
    else:
        replace_file(path, data)


def _sync_folder(folder: Path) -> None:
    """Put on disk what the folder had before."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
