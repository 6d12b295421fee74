"""The kernels: which are chosen, and that asking for others is obeyed or refused."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.support.kernel_variants import EVERY
from ttrace.errors import TTraceError
from ttrace.values.kernels.choice import TORCH, choose_kernels, list_variants, use_kernels
from ttrace.values.kernels.library import VARIANTS, is_readable
from ttrace.values.stats import measure_difference

pytestmark = pytest.mark.usefixtures("new_environment")


def test_the_best_variant_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TTRACE_KERNELS", raising=False)
    assert [name for name in VARIANTS if name in list_variants()] == list(list_variants())
    found = choose_kernels()
    assert (found.variant if found else TORCH) == [*list_variants(), TORCH][0]


@pytest.mark.parametrize("variant", EVERY)
def test_the_environment_chooses(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRACE_KERNELS", variant)
    found = choose_kernels()
    assert (found.variant if found else TORCH) == variant


def test_a_block_chooses_for_itself_and_its_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRACE_KERNELS", EVERY[0])
    seen = []
    with use_kernels(TORCH):
        assert choose_kernels() is None
        thread = threading.Thread(target=lambda: seen.append(choose_kernels()))
        thread.start()
        thread.join()
    found = choose_kernels()
    assert seen == [found]
    assert (found.variant if found else TORCH) == EVERY[0]


def test_unknown_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TTraceError, match=r"no kernels 'avx9000' here; known are .*torch"), use_kernels("avx9000"):
        pass
    monkeypatch.setenv("TTRACE_KERNELS", "avx9000")
    with pytest.raises(TTraceError, match="no kernels 'avx9000'"):
        measure_difference(torch.zeros(3), torch.zeros(3))


def test_only_dense_numbers_in_memory_are_given_to_kernels() -> None:
    assert is_readable(torch.zeros(3, dtype=torch.bfloat16))
    assert not is_readable(torch.zeros(3, dtype=torch.int64))
    assert not is_readable(torch.zeros(3, dtype=torch.complex64))
    assert not is_readable(torch.zeros(3, device="meta"))
    assert not is_readable(torch.zeros(3).to_sparse())
