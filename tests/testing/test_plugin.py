"""Three lines in a test find a missing all-reduce, in a failure that fits a screen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ttrace.errors import TTraceError
from ttrace.testing import assert_equivalent
from ttrace.testing.call import FunctionCall
from zoo.harness.limits import HANG

PYTEST = (sys.executable, "-m", "pytest", "-p", "pytest_ttrace", "-p", "no:cacheprovider")


@pytest.mark.slow
def test_a_missing_all_reduce_is_found_in_three_lines(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "mlp.py"
    done = subprocess.run(
        [*PYTEST, str(script), "-q", "--basetemp", str(tmp_path / "base")],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (shown,) = re.findall(r"^_+ test_two_ranks.*?^=+ ", done.stdout, re.S | re.M)
    assert "equivalent(train, ranks=2)" in shown
    assert "what enters 1.norm is wrong (grad_output): replicas differ and sum to the reference" in shown
    assert "missing all-reduce over tp" in shown
    assert "mlp.py" in shown
    assert len(shown.splitlines()) <= 40


def test_a_function_that_other_processes_cannot_find_is_refused() -> None:
    with pytest.raises(TTraceError, match="a function of a module's top level"):
        assert_equivalent(lambda: None)


def test_arguments_that_cannot_be_sent_are_named(tmp_path: Path) -> None:
    call = FunctionCall.of(assert_equivalent, (lambda: None,))
    with pytest.raises(TTraceError, match="the arguments of assert_equivalent cannot be sent"):
        call.save(tmp_path / "call")
