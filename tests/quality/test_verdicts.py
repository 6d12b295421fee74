"""What TTrace is for: clean runs are quiet, wrong ones are found, first where they are wrong."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from ttrace.judge.verdict import Exit, Judgement
from zoo.harness.ranks import on_ranks
from zoo.harness.runs import Change, gpt_case

NUM_SEEDS = 20


def run_cases(folder: Path, cases: list[tuple[str, torch.dtype, int, Change | None]]) -> dict[str, Judgement]:
    found: dict[str, Judgement] = {}
    for name, dtype, seed, change in cases:
        judgement = gpt_case(folder / name, dtype, seed, change)
        if judgement is not None:
            found[name] = judgement
    return found


def scale_weight(name: str, on_rank: int, factor: float, model: nn.Module, rank: int) -> None:
    if rank == on_rank:
        model.get_parameter(name).mul_(factor)


def scale_inside(name: str, on_rank: int, factor: float, model: nn.Module, rank: int) -> None:
    """The same, where no record of the parameter shows it: only what the module computes is wrong."""
    if rank == on_rank:
        module = model.get_submodule(name)
        forward = module.forward
        module.forward = lambda x: forward(x) * factor


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)], ids=str)
def test_a_correct_run_is_quiet(tmp_path: Path, dtype: torch.dtype) -> None:
    cases: list[tuple[str, torch.dtype, int, Change | None]] = [
        (str(seed), dtype, seed, None) for seed in range(NUM_SEEDS)
    ]
    judgements = on_ranks(2, run_cases, tmp_path, cases)[0]
    assert len(judgements) == NUM_SEEDS
    for seed, judgement in judgements.items():
        wrong = [(str(c.id), c.excess) for c in judgement.comparisons if c.verdict.is_wrong]
        assert judgement.exit is Exit.PASSED, (seed, wrong, judgement.problems)


def test_two_percent_in_one_shard_is_found_first_at_its_module(tmp_path: Path) -> None:
    names = ["layers.0.attention.qkv.weight", "layers.1.mlp.fc2.weight", "layers.2.mlp.fc1.weight"]
    cases: list[tuple[str, torch.dtype, int, Change | None]] = [
        (name, torch.float32, 0, functools.partial(scale_weight, name, 1, 1.02)) for name in names
    ]
    judgements = on_ranks(2, run_cases, tmp_path, cases)[0]
    for name in names:
        judgement = judgements[name]
        assert judgement.exit is Exit.FOUND
        assert judgement.findings[0].module == name.removesuffix(".weight")
        assert len(judgement.findings) == 1, [str(f.comparison.id) for f in judgement.findings]
        assert judgement.findings[0].cause.sentence == "only the shards of rank 1 are wrong"


def test_two_percent_in_what_one_rank_computes_is_found_at_its_module(tmp_path: Path) -> None:
    modules = ["layers.0.attention.qkv", "layers.2.mlp.fc1"]
    cases: list[tuple[str, torch.dtype, int, Change | None]] = [
        (name, torch.float32, 0, functools.partial(scale_inside, name, 1, 1.02)) for name in modules
    ]
    judgements = on_ranks(2, run_cases, tmp_path, cases)[0]
    for name in modules:
        first = judgements[name].findings[0]
        assert str(first.comparison.id) == f"0/0/{name}/output"
        assert first.cause.sentence == "only the shards of rank 1 are wrong"
