"""Known findings do not fail, others do, and what is gone is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.traces import Case, draw_tensor
from ttrace.errors import TTraceError
from ttrace.judge.baseline import NOTHING, Baseline, Known
from ttrace.judge.verdict import CauseName, Exit, Judgement


def judge(folder: Path, *wrong: str, lacking: bool = False) -> Judgement:
    case = Case(folder)
    case.add_right("0/0/a/output")
    for name in wrong:
        case.add(name, draw_tensor(4, 8), "a b/tp", lambda x: 2 * x)
    if lacking:
        case.add_trusted("0/0/gone/output", draw_tensor(4, 8))
    return case.judge()


def test_known_findings_do_not_fail_and_new_ones_do(tmp_path: Path) -> None:
    old = judge(tmp_path / "old", "0/0/fc1/output")
    assert NOTHING.exit(old) is Exit.FOUND
    Baseline.of(old).save(tmp_path / "baseline.json")
    known = Baseline.load(tmp_path / "baseline.json")
    assert known.known == (Known(site="fc1/output", cause=CauseName.DOUBLE_REDUCTION, axis="tp"),)
    assert known.exit(old) is Exit.PASSED
    assert known.add_notes(old).notes[-1] == "fc1/output (double reduction) is in the baseline: it does not fail"
    new = judge(tmp_path / "new", "0/0/fc2/output")
    assert known.exit(new) is Exit.FOUND
    assert [finding.module for finding in known.find_new(new)] == ["fc2"]
    assert known.add_notes(new).notes[-1].endswith("is in the baseline, and is no finding any more")


OLD = """{
 "schema_version": 1,
 "findings": [
  {
   "site": "fc1/output",
   "cause": "double reduction",
   "axis": "tp"
  },
  {
   "site": "layers.1.norm.weight/param_grad",
   "cause": "missing all-reduce",
   "axis": "tp"
  },
  {
   "site": "head.weight/update",
   "cause": "another's values",
   "axis": null
  }
 ]
}
"""
"""As version 0.1 wrote it."""


def test_a_baseline_of_version_0_1_still_holds(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(OLD)
    known = Baseline.load(path)
    causes = [one.cause for one in known.known]
    assert causes == [CauseName.DOUBLE_REDUCTION, CauseName.MISSING_ALL_REDUCE, CauseName.OTHERS_VALUES]
    assert known.exit(judge(tmp_path / "run", "0/0/fc1/output")) is Exit.PASSED
    known.save(path)
    assert path.read_text() == OLD


def test_what_could_not_be_judged_is_not_known(tmp_path: Path) -> None:
    old = judge(tmp_path, "0/0/fc1/output", lacking=True)
    assert Baseline.of(old).exit(old) is Exit.UNJUDGED


def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    for text in ("", "[]", '{"findings": [{"site": "a"}]}', '{"schema_version": 2}'):
        path.write_text(text)
        with pytest.raises(TTraceError, match="is no baseline"):
            Baseline.load(path)
