"""What computes: torch and every variant of the kernels that this machine has, or only what TTRACE_KERNELS asks for."""

from __future__ import annotations

import os

import pytest

from ttrace.values.kernels.library import TORCH, list_variants

EVERY = [asked] if (asked := os.environ.get("TTRACE_KERNELS")) else [*list_variants(), TORCH]
EACH_VARIANT = pytest.mark.parametrize("variant", EVERY)
