"""Variants to test: torch and every variant of the kernels on this machine, or only the one in TTRACE_KERNELS."""

from __future__ import annotations

import os

import pytest

from ttrace.values.kernels.choice import TORCH, list_variants

EVERY = [asked] if (asked := os.environ.get("TTRACE_KERNELS")) else [*list_variants(), TORCH]
EACH_VARIANT = pytest.mark.parametrize("variant", EVERY)
