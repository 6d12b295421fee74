"""Known deviations are excused for a reason and until a day, and never in silence."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from tests.support.traces import Case, draw_tensor
from ttrace.errors import TTraceError
from ttrace.judge.check import check
from ttrace.judge.policy import NOTHING, Allowance, Baseline, Known, Policy
from ttrace.judge.verdict import CauseName, Exit, Judgement

TODAY = datetime.date(2027, 1, 15)


def allowed(site: str, until: str = "2027-01-31") -> Policy:
    allowance = Allowance(site=site, reason="ties break the other way", until=datetime.date.fromisoformat(until))
    return Policy((allowance,), TODAY)


def judge(folder: Path, policy: Policy, *wrong: str) -> Judgement:
    case = Case(folder)
    case.add_right("0/0/fc1/input", "0/0/fc1/output")
    for name in wrong:
        case.add(name, draw_tensor(4, 8), "a b/tp", lambda x: 2 * x)
    return check(case.reference.close(), [case.twin.close()], case.candidate.close(), policy=policy)


def test_what_is_allowed_is_no_finding_and_is_told(tmp_path: Path) -> None:
    judgement = judge(tmp_path, allowed("fc2/output"), "0/0/fc2/output")
    assert judgement.exit is Exit.PASSED
    assert (
        '"fc2/output" is allowed to differ until 2027-01-31, 1 tensors do: ties break the other way' in judgement.notes
    )


def test_an_allowance_excuses_its_own_sites_only(tmp_path: Path) -> None:
    judgement = judge(tmp_path, allowed("fc2/output"), "0/0/fc2/output", "0/0/fc3/output")
    assert [finding.module for finding in judgement.findings] == ["fc3"]


def test_an_allowance_ends(tmp_path: Path) -> None:
    judgement = judge(tmp_path, allowed("fc2/output", until="2027-01-14"), "0/0/fc2/output")
    assert judgement.exit is Exit.FOUND
    assert 'the allowance for "fc2/output" ended on 2027-01-14' in judgement.notes


def test_an_allowance_holds_on_its_last_day(tmp_path: Path) -> None:
    assert judge(tmp_path, allowed("fc2/output", until="2027-01-15"), "0/0/fc2/output").exit is Exit.PASSED


def test_an_allowance_that_is_not_needed_asks_to_be_dropped(tmp_path: Path) -> None:
    judgement = judge(tmp_path, allowed("fc1/output"))
    assert judgement.exit is Exit.PASSED
    assert 'the allowance for "fc1/output" excuses nothing: remove it' in judgement.notes


def test_a_file_says_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "allow.toml"
    path.write_text('[[allow]]\nsite = "*.router"\nreason = "known"\nuntil = 2027-01-31\n')
    assert Policy.load(path).allowances[0].until == datetime.date(2027, 1, 31)


@pytest.mark.parametrize(
    "text",
    [
        '[[allow]]\nsite = "a"\nuntil = 2027-01-31\n',
        '[[allow]]\nsite = "a"\nreason = "b"\n',
        "allow = 3",
        "[[allow",
        "",
    ],
    ids=["no reason", "no day", "no table", "no TOML", "no file"],
)
def test_a_file_that_gives_no_reason_or_day_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "allow.toml"
    if text:
        path.write_text(text)
    with pytest.raises(TTraceError, match="site, reason and until"):
        Policy.load(path)


# Known findings do not fail, others do, and what is gone is told.


def judge_known(folder: Path, *wrong: str, lacking: bool = False) -> Judgement:
    case = Case(folder)
    case.add_right("0/0/a/output")
    for name in wrong:
        case.add(name, draw_tensor(4, 8), "a b/tp", lambda x: 2 * x)
    if lacking:
        case.add_trusted("0/0/gone/output", draw_tensor(4, 8))
    return case.judge()


def test_known_findings_do_not_fail_and_new_ones_do(tmp_path: Path) -> None:
    old = judge_known(tmp_path / "old", "0/0/fc1/output")
    assert NOTHING.exit(old) is Exit.FOUND
    Baseline.of(old).save(tmp_path / "baseline.json")
    known = Baseline.load(tmp_path / "baseline.json")
    assert known.known == (Known(site="fc1/output", cause=CauseName.DOUBLE_REDUCTION, axis="tp"),)
    assert known.exit(old) is Exit.PASSED
    assert known.add_notes(old).notes[-1] == "fc1/output (double reduction) is in the baseline: it does not fail"
    new = judge_known(tmp_path / "new", "0/0/fc2/output")
    assert known.exit(new) is Exit.FOUND
    assert [finding.module for finding in known.find_new(new)] == ["fc2"]
    assert known.add_notes(new).notes[-1].endswith("is in the baseline, but is not a finding any more")


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
    assert known.exit(judge_known(tmp_path / "run", "0/0/fc1/output")) is Exit.PASSED
    known.save(path)
    assert path.read_text() == OLD


def test_what_could_not_be_judged_is_not_known(tmp_path: Path) -> None:
    old = judge_known(tmp_path, "0/0/fc1/output", lacking=True)
    assert Baseline.of(old).exit(old) is Exit.UNJUDGED


def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    for text in ("", "[]", '{"findings": [{"site": "a"}]}', '{"schema_version": 2}'):
        path.write_text(text)
        with pytest.raises(TTraceError, match="cannot read the baseline file"):
            Baseline.load(path)
