"""Engines: the same verdicts wherever a check works, and nothing is lost with a worker."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench._tensors import write_run
from ttrace.errors import TTraceError
from ttrace.judge.compare import Comparer
from ttrace.judge.engine import Lot
from ttrace.judge.reason import Reason, Why
from ttrace.judge.tolerance.model import ToleranceModel, TwinComparer
from ttrace.judge.tolerance.twins import TwinSample
from ttrace.judge.verdict import Comparison, RegionError, Tolerance, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.layouts.rules import Rules
from ttrace.trace.reader import Trace
from ttrace.trace.relayout import RelayoutTrace
from ttrace.values.stats import Stats
from ttrace.workflow.engines.result_cache import ResultCache
from ttrace.workflow.engines.torchrun import Torchrun, divide_lots
from ttrace.workflow.run import Run
from zoo.harness.limits import HANG

IDS = [TensorId.parse(f"0/0/layers.{layer}/output") for layer in range(8)]
LOT = Lot(IDS[:2], 5)


def test_divide_lots_are_all_lots_in_order_and_about_the_same_bytes() -> None:
    lots = [Lot(IDS, num_bytes) for num_bytes in (100, 1, 1, 98, 50, 50, 0, 100)]
    for num_ranks in (1, 2, 3, 4, 9):
        found = divide_lots(lots, num_ranks)
        assert [lot for share in found for lot in share] == lots
        assert max(sum(lot.num_bytes for lot in share) for share in found) <= 400 / num_ranks + 100
    assert divide_lots([], 2) == [[], []]
    assert len(divide_lots([Lot(IDS, 0)] * 8, 2)[0]) == 4, "what takes no bytes takes time"


def test_results_are_kept_bit_by_bit(tmp_path: Path) -> None:
    comparison = Comparison(
        IDS[0],
        Verdict.FAIL,
        Why(Reason.ALLOWED, "größe", ("tp",), ((2, 3), ()), (1,), value=0.1, limit=math.inf, text="größe"),
        Stats(3, 0.1 + 0.2, max_diff=5e-324, max_at=(1, 2)),
        Tolerance(1e-3, math.inf, 1 / 3),
        (RegionError((0, 3), 2 / 3),),
    )
    sample = (TwinSample(IDS[1], 7, torch.bfloat16, (0.1, 1e300)), (Stats(1), Stats(2, inf_a=1)))
    for work, results in (
        (Comparer.comparisons, [comparison, Comparison(IDS[1], Verdict.MISSING)]),
        (TwinComparer.samples, [sample]),
    ):
        assert ResultCache(tmp_path, "rank-0.jsonl", work, "these").find(LOT) is None
        ResultCache(tmp_path, "rank-0.jsonl", work, "these").add(LOT, list(results))
        assert ResultCache(tmp_path, "rank-1.jsonl", work, "these").find(LOT) == results
        assert ResultCache(tmp_path, "rank-1.jsonl", work, "these").find(Lot(IDS[:3], 5)) is None
        assert ResultCache(tmp_path, "rank-1.jsonl", work, "other traces, or other rules").find(LOT) is None


def test_what_was_cut_off_or_damaged_was_not_kept(tmp_path: Path) -> None:
    ResultCache(tmp_path, "rank-0.jsonl", Comparer.comparisons, "").add(LOT, [Comparison(IDS[0], Verdict.PASS)])
    file = tmp_path / "rank-0.jsonl"
    text = file.read_text()
    for damaged in (
        text[:-20],
        text.replace("PASS", "MAYBE"),
        text.replace("PASS", "FAIL"),
        text.replace(" 0.0", " 0.5", 1),
        text.replace('["', "[["),
        text[:33],
        text.split()[0] + " [[7]]\n",
    ):
        assert damaged != text
        file.write_text(damaged)
        assert ResultCache(tmp_path, "rank-0.jsonl", Comparer.comparisons, "").find(LOT) is None


def test_what_is_kept_is_of_the_same_traces_and_rules(tmp_path: Path) -> None:
    """The isolated run has the same ids as the ordinary one, and edited rules the same traces."""
    for name in ("run", "isolated"):
        write_run(tmp_path / name, 20, (4, 4), wrong=1 if name == "run" else None)

    def comparer(name: str, rules: dict[str, str] | None = None) -> Comparer:
        folder = tmp_path / name
        reference = Trace(folder / "reference")
        candidate = folder / "candidate"
        relaid = Trace(candidate) if rules is None else RelayoutTrace(candidate, Rules.of(rules), reference)
        return Comparer(reference, ToleranceModel.measure(reference, [Trace(folder / "twin-1")]), relaid)

    contexts = [
        comparer("run"),
        comparer("isolated"),
        comparer("run", {"layers.0/output": "t h"}),
        comparer("run", {"layers.0/output": "t h/tp"}),
    ]
    assert len({context.identity for context in contexts}) == len(contexts)
    assert comparer("run").identity == comparer("run").identity
    wide = {t: replace(one, value=7.0) for t, one in contexts[0].twins.tolerances.items()}
    noisy = replace(contexts[0], twins=replace(contexts[0].twins, tolerances=wide))
    assert noisy.identity != contexts[0].identity


def test_torchrun_is_asked_for_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(TTraceError, match="torchrun --nproc-per-node 8 -m ttrace check RUN --engine torchrun"):
        Torchrun(tmp_path)


@pytest.mark.nightly
def test_verdicts_are_the_same_on_every_engine(tmp_path: Path) -> None:
    """30 s on two cores that others use: two commands, one of which imports torch in every rank."""
    run = Run(tmp_path / "run")
    write_run(run.folder, 1500, (8, 8), wrong=7)
    files = {}
    for engine in ("threads", "torchrun"):
        launcher = (
            ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") if engine == "torchrun" else ()
        )
        ended = checked(run.folder, engine, *launcher)
        assert ended.returncode == 1, ended.stderr
        assert ("exit code 1: also in" in ended.stderr) == (engine == "torchrun")
        assert (run.folder / "exit-code").exists() == (engine == "torchrun")
        files[engine] = (run.folder / "report.json").read_bytes()
        (run.folder / "report.json").unlink()
    assert set(files.values()) == {files["threads"]}
    assert not list(run.folder.glob("check-*")), "a finished check keeps nothing"


def checked(folder: Path, engine: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "ttrace", "check", str(folder), "--engine", engine]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=variables)
