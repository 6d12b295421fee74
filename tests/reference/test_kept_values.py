"""Values are kept up to a limit, the latest ones, and never overwritten while an operator may read them."""

from __future__ import annotations

import torch

from ttrace.reference.kept_values import KeptValues


def read(kept: KeptValues, number: int) -> torch.Tensor:
    """Read a parameter of four numbers, each of which is its own."""
    found = kept.read(number, 4, torch.float32, torch.device("cpu"), lambda out: out.fill_(number))
    assert found is not None
    return found


def test_arguments_of_one_operator_do_not_overwrite_each_other() -> None:
    kept = KeptValues(max_bytes=2 * 16)
    values = [read(kept, number) for number in range(6)]
    assert [float(value[0]) for value in values] == [0, 1, 2, 3, 4, 5]


def test_more_than_the_limit_is_not_kept() -> None:
    kept = KeptValues(max_bytes=8)
    assert kept.read(0, 4, torch.float32, torch.device("cpu"), lambda out: out.fill_(1)) is None


def test_backward_gets_each_value_once() -> None:
    kept = KeptValues(max_bytes=1 << 20)
    seen: list[float | None] = []
    weight = torch.ones(4, requires_grad=True)

    class Use(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return x * read(kept, 3)

        @staticmethod
        def backward(_ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                again = kept.read(3, 4, torch.float32, torch.device("cpu"), lambda out: out.fill_(7))
                seen.append(None if again is None else float(again[0]))
            return gradient

    Use.apply(weight).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [3.0, None]
