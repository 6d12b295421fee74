"""Small models for megatron-core: cases that the tests of it share."""

from __future__ import annotations

from zoo.harness.megatron.case import Case

BF16, FP16 = "bfloat16", "float16"


def gpt(**settings: object) -> Case:
    return Case(**settings)  # type: ignore[arg-type]


def llama(**settings: object) -> Case:
    return gpt(swiglu=True, groups=2, rope=True, rmsnorm=True, tied=False, bias=False, **settings)


def moe(**settings: object) -> Case:
    return gpt(experts=4, bias=False, **settings)


def mla(**settings: object) -> Case:
    return gpt(mla=True, rmsnorm=True, tied=False, bias=False, **settings)
