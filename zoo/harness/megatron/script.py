"""Run a script as `python script.py` would, where `import megatron.core` gives a wheel on CPU.

torchrun --nproc-per-node 2 -m zoo.harness.megatron.script SCRIPT ARGUMENTS
"""

import runpy
import sys

from zoo.harness.megatron.install import install

if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
