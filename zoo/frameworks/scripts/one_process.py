"""Sets what torchrun would set, for a script that runs without it in one process: import this first."""

import os

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
for name, value in ALONE.items():
    os.environ.setdefault(name, value)
