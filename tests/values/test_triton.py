"""Values and sketches on an accelerator: kernels in Triton give what those in C give. Its interpreter runs them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.pages import ROOT
from zoo.harness.with_wheels import unpack_release

RELEASE = "triton==3.9.0"


@pytest.mark.slow  # it is a download of 270 MB
def test_triton_computes_what_the_c_kernels_compute() -> None:
    # Not in the environment: torch's compiler would find it there.
    path = os.pathsep.join((str(unpack_release(RELEASE)), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_cases"],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
