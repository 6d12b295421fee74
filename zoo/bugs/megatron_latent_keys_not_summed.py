"""megatron-core 0.16.1: the rotary part of latent keys gets the gradient of one rank's heads.

`linear_kv_down_proj` is gathered over tp and split into a compressed part, of which the next projection sums the
gradient, and a rotary part that goes to this rank's heads directly. In backward the gather keeps this rank's columns
and sums nothing. Forward and loss are right. docs/found/mla-with-tp.md has a script.
"""

from __future__ import annotations

from typing import Any

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.released import Released, dense


def latent(**settings: Any) -> Released:
    return dense(mla=True, rmsnorm=True, tied=False, bias=False, layers=4, **settings)


BUG = Bug(
    tier=Tier.T1,
    topic=Topic.MISSING_COMMUNICATION,
    package="megatron-core 0.12.3-0.16.1",
    sources=(
        "https://github.com/NVIDIA/Megatron-LM/issues/1699",
        "https://github.com/NVIDIA/Megatron-LM/pull/6839",
    ),
    case=latent(tp=2),
    clean_case=latent(),
    expected=Expected(
        "decoder.layers.3.self_attention",
        "grad_input",
        "some rows",
        words="linear_kv_down_proj is wrong (grad_output): only 4 of 20 indices of dim 2 are wrong: 16-19",
    ),
)
