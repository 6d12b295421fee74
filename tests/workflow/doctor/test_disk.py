"""The disk is measured with a real file, of which nothing is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ttrace.workflow.doctor.disk import measure_disk


def test_free_space_and_speed_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    disk = measure_disk(tmp_path)
    assert disk.error == ""
    assert (disk.free_bytes or 0) > 0
    assert (disk.bytes_per_second or 0) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    disk = measure_disk(tmp_path / "not" / "yet")
    assert (disk.folder, disk.error) == (tmp_path / "not" / "yet", "")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    disk = measure_disk(tmp_path)
    assert (disk.bytes_per_second, disk.error) == (None, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    assert measure_disk(tmp_path / "runs").error == "Not a directory"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux has a folder that nobody can write into")
def test_a_folder_that_cannot_be_written_is_an_error() -> None:
    disk = measure_disk(Path("/proc/runs"))
    assert disk.bytes_per_second is None
    assert disk.error
