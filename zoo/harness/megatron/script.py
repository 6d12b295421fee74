"""Run a script as `python script.py` would, where `import megatron.core` gives a wheel on CPU.

torchrun --nproc-per-node 2 -m zoo.harness.megatron.script SCRIPT ARGUMENTS
"""

import os
import runpy
import sys

from zoo.harness.megatron.install import install
from zoo.harness.megatron.wheels import NEWEST

VERSION = "TTRACE_MEGATRON"
"""The version of the wheel; by default the newest one for Python 3.11."""

if __name__ == "__main__":
    install(os.environ.get(VERSION, NEWEST))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
