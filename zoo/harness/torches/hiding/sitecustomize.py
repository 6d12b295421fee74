"""Hides installed packages that need another torch than the one that runs: Python imports this when it starts."""

import os
import sys

for name in os.environ.get("TTRACE_HIDDEN", "").split():
    sys.modules[name] = None  # type: ignore[assignment]  # which is how an import is made to fail
