"""A sweep over 24 layouts that finds when the paper's bug 14 occurs, in under 8 minutes; a clean sweep passes.

With `--all` also the clean sweep: 24 other layouts of the same model, with one reference.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONDITION = "fails iff tp > 1 and cp > 1 and fp8"
MOST_MINUTES = 8.0


def main(*options: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        found = swept(ROOT / "zoo" / "sweep.toml", Path(folder) / "bug")
        minutes = (time.monotonic() - start) / 60
        print(f"{len(found['cells'])} layouts, {found['references']} references: {found['condition']}")
        is_good = found["condition"] == CONDITION and len(found["cells"]) >= 24
        if "--all" in options:
            clean = swept(ROOT / "zoo" / "sweep-clean.toml", Path(folder) / "clean")
            passed = sum(cell["exit"] == 0 for cell in clean["cells"])
            print(f"clean: {passed} of {len(clean['cells'])} pass, {clean['references']} reference")
            is_good &= passed == len(clean["cells"]) >= 24 and clean["references"] == 1
    print(f"{minutes:.1f} minutes for the condition (at most {MOST_MINUTES:.0f})")
    return 0 if is_good and minutes < MOST_MINUTES else 1


def swept(file: Path, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "ttrace", "sweep", str(file), "--out", str(out), "--max-ranks", "4", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return report
