"""Known deviations are excused for a reason and until a day, and never in silence."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from tests.support.traces import Case, draw_tensor
from ttrace.errors import TTraceError
from ttrace.judge.check import check
from ttrace.judge.policy import Allowance, Policy
from ttrace.judge.verdict import Exit, Judgement

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
    assert 'the allowance for "fc1/output" excuses nothing: drop it' in judgement.notes


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
