"""Megatron-LM's own pretrain_gpt.py, unchanged: it passes under TP and PP, and another weight decay is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.commands import ttrace
from zoo.harness.megatron.pretraining import CHECKOUT

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.skipif(CHECKOUT not in os.environ, reason=f"{CHECKOUT} names no checkout of Megatron-LM"),
]

ARGUMENTS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --lr-decay-iters 10 --weight-decay 0.01
    --clip-grad 1.0 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --position-embedding-type rope
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --hidden-dropout 0 --attention-dropout 0
    --distributed-backend gloo --use-cpu-initialization --disable-jit-fuser --num-workers 0 --eval-iters 0
    --eval-interval 1000 --no-create-attention-mask-in-dataloader
"""


def make_command(num_ranks: int, more: str) -> str:
    launcher = f"torchrun --standalone --nproc-per-node {num_ranks} -m zoo.harness.megatron.pretraining"
    return " ".join(f"{launcher} pretrain_gpt.py {ARGUMENTS} {more}".split())


@pytest.mark.timeout(1200)
def test_the_script_passes_in_two_layouts_and_a_difference_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-LM asks for it
    options = ("--twins", "1", "--no-repeat", "--no-isolate", "--out", str(tmp_path / "run"))
    reference = make_command(1, "--make-vocab-size-divisible-by 128")
    for more, exit_, words in (
        ("--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64", 0, "742 PASS"),
        ("--pipeline-model-parallel-size 2 --make-vocab-size-divisible-by 128", 0, "742 PASS"),
        ("--make-vocab-size-divisible-by 128 --weight-decay 0.1", 1, "weight_decay"),
    ):
        done = ttrace("run", *options, "--reference", reference, "--candidate", make_command(2, more))
        assert done.returncode == exit_, done.stdout + done.stderr
        assert words in done.stdout
