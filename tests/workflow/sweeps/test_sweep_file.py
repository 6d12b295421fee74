"""A sweep's file gives cells and their commands, and says what is wrong with it; its expressions do nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttrace.errors import TTraceError
from ttrace.workflow.sweeps.failure_condition import evaluate
from ttrace.workflow.sweeps.sweep_file import Matrix

FILE = """
reference = "python train.py {fp8}"
candidate = "torchrun --nproc-per-node {ranks} train.py --tp {tp} --schedule {schedule} {fp8} --set {x}={{}}"
exclude = ["ranks > 4", "schedule == 'zb' and not tp > 1"]

[axes]
tp = [1, 2, 4]
schedule = ["gpipe", "zb"]
fp8 = "--fp8 --amax 1"

[derived]
x = "tp % 2"
ranks = "tp * 2"
"""


def load(folder: Path, text: str) -> Matrix:
    path = folder / "sweep.toml"
    path.write_text(text)
    return Matrix.load(path)


def test_cells_are_all_combinations_that_are_not_excluded(tmp_path: Path) -> None:
    matrix = load(tmp_path, FILE)
    assert [cell.name for cell in matrix.cells] == [
        "tp=1 schedule=gpipe",
        "tp=1 schedule=gpipe fp8",
        "tp=2 schedule=gpipe",
        "tp=2 schedule=gpipe fp8",
        "tp=2 schedule=zb",
        "tp=2 schedule=zb fp8",
    ]
    last = matrix.cells[-1]
    assert last.reference == ("python", "train.py", "--fp8", "--amax", "1")
    assert " ".join(last.candidate) == (
        "torchrun --nproc-per-node 4 train.py --tp 2 --schedule zb --fp8 --amax 1 --set 0={{}}"
    )
    assert (last.num_ranks, last.folder) == (4, "tp=2-schedule=zb-fp8")
    assert matrix.cells[0].reference == ("python", "train.py")
    assert len({cell.folder for cell in matrix.cells}) == len(matrix.cells)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[axes]", "[axis]", "cannot read the sweep file"),
        ('"tp * 2"', '"tpp * 2"', "nothing is called 'tpp'; there are tp, schedule, fp8"),
        ('"ranks > 4"', '"ranks > 0"', "excludes every cell"),
        ('"tp * 2"', '"tp - 4"', "takes -3 ranks"),
        ("[1, 2, 4]", "[1, 1]", "each value once"),
        ("[1, 2, 4]", "[1, '1']", "each value once"),
        ("{tp}", "{dp}", "names {dp}, but there are only tp, schedule, fp8, x, ranks"),
        ("[1, 2, 4]", "[[1]]", "cannot read the sweep file"),
        ("[1, 2, 4]", f"[0x{'f' * 4000}]", "'tp' has a number that does not fit into 64 bits"),
        ("[1, 2, 4]", str([*range(5000)]), "the sweep has 20000 cells, but at most 4096 are run"),
        ('"tp * 2"', f"'0x{'f' * 4000}'", "a number does not fit into 64 bits"),
        ("tp = [1", "x = [1", "'x' is an axis and derived"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(TTraceError) as told:
        load(tmp_path, FILE.replace(old, new))
    assert words in str(told.value)


def test_every_cell_has_a_folder_of_its_own(tmp_path: Path) -> None:
    file = """
reference = "python train.py"
candidate = "python train.py {a} {b}"
[axes]
a = ["a b", "a/b", "a_b", "1", "1-b=2", "ä b"]
b = ["3", "2-b=3", "..", "a b"]
"""
    folders = [cell.folder for cell in load(tmp_path, file).cells]
    assert len(set(folders)) == 24
    assert "a=a_b-b=3" in folders, "a plain one is plain"
    assert all(Path(folder).name == folder for folder in folders)
    assert folders == [cell.folder for cell in load(tmp_path, file).cells]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TTraceError, match=r"cannot read the sweep file .*none\.toml"):
        Matrix.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("tp * cp + 1", 9),
        ("1 < tp <= 4 and not fp8", True),
        ("tp == 4 or nothing", True),
        ("name in ('a', 'b')", True),
        ("name not in ['c']", True),
        ("-tp // 3", -2),
    ],
)
def test_expressions_compute(text: str, value: object) -> None:
    assert evaluate(text, {"tp": 4, "cp": 2, "fp8": False, "name": "a"}) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "tp.real",
        "name * 1000000000",
        "tp ** tp",
        "1 << 99999999",
        "[tp for tp in (1,)]",
        "lambda: 1",
        "tp[0]",
        "tp is 4",
        "tp < name",
        "tp %% 0",
        "tp % 0",
        "0.5 * 0x" + "f" * 400,
        "tp * 9223372036854775807",
        "missing",
        "f'{tp}'",
        "-" * 100_000 + "1",
    ],
)
def test_expressions_do_nothing_else(text: str) -> None:
    with pytest.raises(TTraceError, match="cannot be computed"):
        evaluate(text, {"tp": 4, "name": "a"})
