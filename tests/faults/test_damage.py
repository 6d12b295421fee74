"""One changed bit in any file of a run: the verdict is what it was, or the check refuses and names the file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.small_runs import OUTPUTS, write_run
from ttrace.capture.plan import Plan
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.errors import CaptureError, TTraceError
from ttrace.judge.verdict import Exit
from ttrace.layouts.ids import TensorId
from ttrace.trace.writer import HEADER_BYTES
from ttrace.workflow.run import Run
from ttrace.workflow.stages import Stage

NUM_FLIPS = 40
"""In every file."""
Outcome = tuple[Exit, list[str], list[str]]


def judge(run: Run) -> Outcome | str:
    """What a check says, or why it refuses."""
    try:
        found = run.judge()
    except TTraceError as error:
        return str(error)
    return found.exit, [str(finding) for finding in found.findings], [str(c) for c in found.comparisons]


@contextmanager
def damaged(path: Path, at: int, bit: int) -> Iterator[None]:
    """The file with one bit changed, in this block."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
        file.flush()
        try:
            yield
        finally:
            file.seek(at)
            file.write(bytes([byte]))


def places(path: Path, chance: random.Random) -> Iterator[tuple[int, int]]:
    """Bits to change: the ends of the file, and some anywhere in what is not reserved for a header."""
    size = path.stat().st_size
    begin = HEADER_BYTES if path.suffix == ".safetensors" else 0
    for at in (0, begin, size - 1, *(chance.randrange(begin, size) for _ in range(NUM_FLIPS - 3))):
        yield at, chance.randrange(8)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def check_flips(run: Run, paths: Iterable[Path]) -> float:
    """Every flip either changes nothing or is refused by name; the share that was refused."""
    chance, expected, refused = random.Random(0), judge(run), []
    for path in paths:
        for at, bit in places(path, chance):
            with damaged(path, at, bit):
                found = judge(run)
            refused.append(isinstance(found, str))
            assert found == expected or str(path) in found, f"bit {bit} of byte {at} of {path}: {found}"
    return sum(refused) / len(refused)


@pytest.mark.parametrize(("wrong", "exit_code"), [(False, Exit.PASSED), (True, Exit.FOUND)])
def test_a_flipped_bit_changes_no_verdict(tmp_path: Path, wrong: bool, exit_code: Exit) -> None:
    run = write_run(tmp_path, wrong=wrong)
    assert judge(run)[0] is exit_code
    # Of a chunk, the header means nothing; everything else does.
    assert check_flips(run, files(tmp_path)) > 0.9


def test_one_flipped_exponent_of_a_twin_excuses_nothing(tmp_path: Path) -> None:
    """A twin that is beyond all measure made the tensor "mathematically zero", and its bug passed."""
    run = write_run(tmp_path, wrong=True)
    chunk = run.twin(1) / "rank-00000" / "chunk-0000.safetensors"
    data = bytearray(chunk.read_bytes())
    for at in range(HEADER_BYTES + 3, len(data), 4):
        data[at] ^= 0x40
    chunk.write_bytes(data)
    with pytest.raises(TTraceError, match=r"twin-1/rank-00000/chunk-0000\.safetensors are damaged"):
        run.judge()


def test_a_file_that_is_gone_is_no_pass(tmp_path: Path) -> None:
    run = write_run(tmp_path, wrong=False)
    for path in files(tmp_path):
        if path.name == "run.json":
            continue
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(TTraceError):
            run.judge()
        path.write_bytes(data)
    assert run.judge().exit is Exit.PASSED


def flip_all(path: Path, check: Callable[[], None]) -> None:
    for at in range(path.stat().st_size):
        with damaged(path, at, at % 8):
            check()


def test_a_damaged_mark_marks_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, wrong=False)
    stage = Stage(("true",), Plan(out=tmp_path / "reference"))
    stage.mark()
    assert stage.is_done()

    def check() -> None:
        assert not stage.is_done()

    flip_all(tmp_path / "reference.done.json", check)
    assert stage.is_done()


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    path, plan = tmp_path / "reference.plan.json", Plan(out=tmp_path / "reference", seed=3, skip=("größe/*",))
    plan.save(path)
    assert Plan.load(path) == plan

    def check() -> None:
        with pytest.raises(CaptureError, match=r"reference\.plan\.json is not a plan"):
            Plan.load(path)

    flip_all(path, check)


def test_a_damaged_trace_is_made_again(tmp_path: Path) -> None:
    run = write_run(tmp_path, wrong=False)
    stage = Stage(("true",), Plan(out=run.candidate))
    assert stage.is_complete()
    for name in ("manifest.json", "end.json"):
        with damaged(run.candidate / "rank-00001" / name, 30, 2):
            assert not stage.is_complete()


def test_what_was_read_while_tracing_is_verified_too(tmp_path: Path) -> None:
    """A candidate takes shapes, values and decisions from the reference's trace."""
    run = write_run(tmp_path, wrong=False)
    tensor_id = TensorId.parse(OUTPUTS[0])
    found = ReferenceTrace(run.reference).tensor(tensor_id)
    assert isinstance(found, torch.Tensor)
    chunk = run.reference / "rank-00000" / "chunk-0000.safetensors"
    with damaged(chunk, HEADER_BYTES + 5, 1), pytest.raises(TTraceError, match="reference/rank-00000/chunk-0000"):
        ReferenceTrace(run.reference).tensor(tensor_id)
