"""A store that vanishes, is slow, behind or wrong changes nothing of the training, and gives no wrong verdict."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.faulty_machine.machine import TRAIN, Trials

DOWN = "the store failed 7 times, the last time with ConnectionResetError"


@dataclass(frozen=True)
class StoreCase:
    """A fault of a store while the candidate is traced or checked."""

    name: str
    while_tracing: str = ""
    """An argument of train.py."""
    while_checking: str = ""
    """A value of STORE_FAULT."""
    exit_code: int = 0
    sentence: str = "86 tensors of 1 ranks in faulty://"
    check_code: int = 2
    check_sentence: str = "86 PASS"
    num_steps: int = 2
    num_traces: int = 1
    """How often the candidate is traced."""

    def __str__(self) -> str:
        return self.name


CASES = (
    StoreCase("none", check_code=0),
    StoreCase("slow", "start:store:slow:", "slow:", check_code=0),
    StoreCase("busy", "start:store:busy:chunk-", "busy:end", check_code=0),
    StoreCase("stale-list", "start:store:stale:", "stale:", check_code=0),
    StoreCase(
        "gone-at-start",
        "start:store:gone:candidate",
        "",
        2,
        f"cannot be written, so nothing is traced: .*{DOWN}",
        check_sentence="candidate holds no trace",
        num_steps=0,
    ),
    StoreCase(
        "denied-at-start",
        "start:store:denied:candidate",
        "",
        2,
        "cannot be written, so nothing is traced: .*403",
        check_sentence="candidate holds no trace",
        num_steps=0,
    ),
    StoreCase(
        "gone-in-a-step",
        "begin0:store:gone:candidate",
        "",
        2,
        DOWN,
        check_sentence="is incomplete: 0 records",
    ),
    StoreCase(
        "chunks-not-stored",
        "begin0:store:gone:chunk-",
        "",
        2,
        f"chunk-0000.safetensors could not be stored, .*{DOWN}",
        check_sentence="chunk-0000.safetensors",
    ),
    StoreCase("end-not-stored", "begin0:store:gone:end.json", "", 2, DOWN, check_sentence="is incomplete: 78 records"),
    StoreCase(
        "spoilt-chunk",
        "start:store:spoilt:candidate/rank-00000/chunk-",
        check_sentence="chunk-0000.safetensors are damaged",
    ),
    StoreCase(
        "spoilt-end",
        "start:store:spoilt:candidate/rank-00000/end",
        "",
        2,
        "end.json is damaged",
        check_sentence="end.json is damaged",
    ),
    StoreCase("gone-in-the-check", "", "gone:candidate/rank-00000/chunk-", check_sentence=DOWN),
    StoreCase(
        "wrong-chunk", "", "wrong:candidate/rank-00000/chunk-", check_sentence="chunk-0000.safetensors are damaged"
    ),
    StoreCase("wrong-records", "", "wrong:candidate/rank-00000/records", check_sentence="records.jsonl is damaged"),
    StoreCase("wrong-twin", "", "wrong:twin-1/rank-00000/records", check_sentence="records.jsonl is damaged"),
    StoreCase(
        "short-chunk", "", "short:candidate/rank-00000/chunk-", check_sentence="chunk-0000.safetensors.*it ends at"
    ),
    StoreCase("unlisted-end", "", "unlisted:candidate/rank-00000/end", check_code=0),
    StoreCase(
        "behind-with-the-end",
        "",
        "behind:candidate/rank-00000/end",
        num_traces=2,
        check_sentence="by different launches",
    ),
    StoreCase("behind-with-chunks", "", "behind:candidate/rank-00000/chunk-", num_traces=2, check_code=0),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_faulty_store_gives_no_wrong_verdict(trials: Trials, tmp_path: Path, case: StoreCase) -> None:
    trials.start(tmp_path)
    store = f"faulty://{tmp_path}/run/store"
    arguments = ("--store", store, "--reference", "run/reference")
    for _ in range(case.num_traces):
        traced = trials.trace(
            tmp_path, "candidate", trials.machine.python(TRAIN, *case.while_tracing.split()), *arguments
        )
        assert traced.status == case.exit_code, traced
        assert re.search(case.sentence, traced.output), traced
        assert "Traceback" not in traced.output, traced
    trials.verify_bits(tmp_path, 1, case.num_steps)
    checked = trials.machine.run(
        "ttrace", "check", store, folder=tmp_path, variables={"STORE_FAULT": case.while_checking}
    )
    assert checked.status == case.check_code, checked
    assert re.search(case.check_sentence, checked.output), checked
    assert not re.search("unexpected|Traceback", checked.output), checked
    trials.verify_nothing_left(tmp_path, "report.json")
