"""One rank of the doctor's launch: `torchrun ... rank.py FOLDER`. It reports its Python, then makes one all-reduce.

It runs as a script of its own, and imports nothing of TTrace: torchrun may belong to a Python that has none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

_LONGEST_WAIT = timedelta(seconds=60)


def main(folder: Path) -> None:
    """Write what runs this rank into a file of the folder, and take part in an all-reduce."""
    about = {"python": sys.executable, "has_ttrace": importlib.util.find_spec("ttrace") is not None}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(about), encoding="utf-8")

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=_LONGEST_WAIT)
    ones = torch.ones(4, dtype=torch.float32, device="cpu")
    dist.all_reduce(ones)
    num_ranks = dist.get_world_size()
    dist.destroy_process_group()
    if ones.tolist() != [num_ranks] * 4:
        raise ValueError(f"an all-reduce of ones over {num_ranks} ranks gave {ones.tolist()}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
