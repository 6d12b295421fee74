"""A training that `ttrace.watch` traces in its midst goes on, bit for bit, whatever happens to the trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.faulty_machine.machine import TRAIN, Trials, read_bits

UNWRITABLE = "ttrace.watch traces nothing from step 0 on: .* cannot be written, so nothing is traced: .*{}"
INCOMPLETE = "ttrace.watch traces nothing from step 2 on: .* could not be completed, so it is not a valid trace: .*{}"
FAULTS = {
    "none": ("", "^((?!ttrace).)*$"),
    "full-at-start": ("start:shim:ERROR:28:write:manifest:0:999", UNWRITABLE.format("No space left")),
    "full-in-a-chunk": ("start:shim:ERROR:28:write:chunk-:0:999", INCOMPLETE.format("No space left")),
    "full-at-the-end": ("start:shim:ERROR:28:write:.end.json:0:999", INCOMPLETE.format("No space left")),
    "broken-sync": ("start:shim:ERROR:5:fsync:watched:0:999", UNWRITABLE.format("Input/output error")),
    "no-files": ("attached:files:0", "ttrace.watch traces nothing from step 0 on: .*Too many open files"),
    "no-files-at-the-end": ("forward1:files:0", "^((?!ttrace).)*$"),
    "another-user": ("attached:nobody", UNWRITABLE.format("Permission denied")),
    "file-in-the-way": ("start:touch:watched", UNWRITABLE.format("(File exists|Not a directory)")),
    "folder-that-vanishes": ("forward1:remove:watched", INCOMPLETE.format("No such file")),
}


@pytest.mark.parametrize(("fault", "sentence"), FAULTS.values(), ids=FAULTS)
def test_a_watched_training_goes_on(trials: Trials, tmp_path: Path, fault: str, sentence: str) -> None:
    ended = trials.machine.run(TRAIN, "watch", *fault.split(), folder=tmp_path)
    assert ended.status == 0, ended
    assert "rank 0 ended" in ended.output
    assert read_bits(ended.output) == trials.find_bits(1)
    assert re.search(sentence, ended.output), ended
    assert not re.search('File "[^"]*/ttrace/', ended.output), ended
    trials.verify_nothing_left(tmp_path, "watched")
