"""Typical mistakes: the entries of tier T4, which were made up, not reported.

`zoo/harness/breaking.py` makes each of them, in the small transformer or in the small hand-written GPT ("hand"). Most
are proofs of a cause. They are not counted among the bugs of docs/evaluation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from zoo.bug import Bug, Case, Expected, Patch, Tier, Topic
from zoo.harness import breaking
from zoo.harness.small import small


def mistake(topic: Topic, case: Case, patch: Patch, expected: Expected, *, is_early: bool = False) -> Bug:
    """Return an entry of this tier: no package had the bug, and its name describes it."""
    return Bug(Tier.T4, topic, "", (), case, expected, patch, is_early)


MISTAKES: Mapping[str, Bug] = {
    "row-without-its-sum": mistake(
        Topic.MISSING_COMMUNICATION,
        small("hand"),
        breaking.no_sum_in("layers.1.mlp.fc2"),
        Expected("layers.1.mlp.fc2", "output", "missing all-reduce", "tp"),
    ),
    "column-without-its-backward-sum": mistake(
        Topic.MISSING_COMMUNICATION,
        small("hand"),
        breaking.no_sum_in("layers.1.attention.qkv"),
        Expected("layers.1.attention.qkv", "grad_input", "missing all-reduce", "tp"),
    ),
    "sums-twice": mistake(
        Topic.SCALING,
        small("hand"),
        breaking.sums_twice,
        Expected("layers.2.mlp.fc1", "grad_input", "double reduction", "tp"),
    ),
    "bias-on-every-rank": mistake(
        Topic.SCALING,
        small("hand"),
        breaking.bias_on_every_rank,
        Expected("layers.0.mlp.fc2", "output", "bias"),
    ),
    "keys-for-values": mistake(
        Topic.DATA,
        small("hand"),
        breaking.keys_for_values,
        Expected("layers.1.attention.qkv", "output", "moved"),
    ),
    "other-layers-weight": mistake(
        Topic.CHECKPOINT,
        small("hand"),
        breaking.other_layers_weight,
        Expected("layers.2.mlp.fc1", "param", "another's values"),
    ),
    "shard-off-by-two-percent": mistake(
        Topic.CHECKPOINT,
        small("hand"),
        breaking.shard_off_by_percents,
        Expected("layers.1.attention.qkv", "param", "some ranks"),
    ),
    "left-out-of-optimizer": mistake(
        Topic.OPTIMIZER,
        small("hand"),
        breaking.left_out_of_optimizer,
        Expected("layers.1.norm2", "update", "not updated"),
    ),
    "in-two-groups": mistake(
        Topic.OPTIMIZER,
        small("hand"),
        breaking.in_two_groups,
        Expected("layers.1.mlp.fc2", "update", "updated twice"),
    ),
    "other-learning-rate": mistake(
        Topic.OPTIMIZER,
        small("hand"),
        breaking.other_learning_rate,
        Expected("head", "update", "optimizer settings"),
    ),
    "other-momentum": mistake(
        Topic.HIDDEN,
        small("hand", optimizer=breaking.sgd),
        breaking.set_in_optimizer(momentum=0.5),
        Expected("words", "update", "optimizer settings"),
    ),
    "other-dampening": mistake(
        Topic.HIDDEN,
        small("hand", optimizer=breaking.sgd),
        breaking.set_in_optimizer(dampening=0.5),
        Expected("words", "update", "optimizer settings"),
    ),
    "no-weight-decay-in-bfloat16": mistake(
        Topic.HIDDEN,
        small("hand", dtype=torch.bfloat16),
        breaking.set_in_optimizer(weight_decay=0.0),
        Expected("words", "update", "optimizer settings"),
    ),
    "learning-rate-in-bfloat16": mistake(
        Topic.HIDDEN,
        small("hand", dtype=torch.bfloat16),
        breaking.set_in_optimizer(lr=1.01e-3),
        Expected("words", "update", "optimizer settings"),
    ),
    "warm-up-to-another-rate": mistake(
        Topic.HIDDEN,
        small("hand", optimizer=breaking.warming_up, num_steps=2),
        breaking.warms_up_to_another_rate,
        Expected("words", "update", "optimizer settings"),
    ),
    "schedule-stepped-by-every-rank": mistake(
        Topic.HIDDEN,
        small("hand", optimizer=breaking.warming_up, num_steps=2),
        breaking.schedule_stepped_by_every_rank,
        Expected("words", "update", "optimizer settings"),
    ),
    "left-out-during-warm-up": mistake(
        Topic.HIDDEN,
        small("hand", optimizer=breaking.warming_up),
        breaking.left_out_of_optimizer,
        Expected("layers.1.norm2", "update", "not updated"),
    ),
    "other-dropout": mistake(
        Topic.HIDDEN,
        small("ddp", shape=replace(breaking.SHAPE, adapt=breaking.with_dropout)),
        breaking.other_dropout,
        Expected("norm.1", "output", "module settings"),
        is_early=True,
    ),
    "dropout-not-in-training-mode": mistake(
        Topic.HIDDEN,
        small("ddp", shape=replace(breaking.SHAPE, adapt=breaking.with_dropout)),
        breaking.evaluated,
        Expected("norm.1", "output", "module settings"),
    ),
    "bfloat16-matmul": mistake(
        Topic.DATA,
        small("hand"),
        breaking.weaker("layers.1.mlp.fc1", torch.bfloat16),
        Expected("layers.1.mlp.fc1", "output", "weaker dtype"),
    ),
    "float16-norm": mistake(
        Topic.DATA,
        small("hand"),
        breaking.weaker("layers.2.norm2", torch.float16),
        Expected("layers.2.norm2", "output", "weaker dtype"),
    ),
    "overflow": mistake(
        Topic.DATA,
        small("hand"),
        breaking.overflows,
        Expected("layers.1.mlp.fc1", "output", "not finite"),
    ),
    "gradient-detached": mistake(
        Topic.DATA,
        small("hand"),
        breaking.gradient_detached,
        Expected("layers.0.attention.proj", "param_grad", "zeros"),
    ),
    "read-transposed": mistake(
        Topic.DATA,
        small("hand"),
        breaking.read_transposed,
        Expected("layers.1.norm2", "output", "transposed"),
    ),
    "wrong-sign": mistake(
        Topic.DATA,
        small("hand"),
        breaking.wrong_sign,
        Expected("layers.2.norm1", "output", "constant factor"),
    ),
    "microbatches-not-averaged": mistake(
        Topic.SCALING,
        small("hand"),
        breaking.not_divided,
        Expected("words", "param_grad", "constant factor", "mb"),
    ),
    "first-rows-lost": mistake(
        Topic.DATA,
        small("tp"),
        breaking.first_rows_lost,
        Expected("tok", "param_grad", "some rows"),
    ),
    "partial-sum-of-dtensors": mistake(
        Topic.MISSING_COMMUNICATION,
        small("tp"),
        breaking.unreduced("layers.2.attention.wo"),
        Expected("layers.2.attention.wo", "output", "missing all-reduce", "tp"),
    ),
    "norm-gradient-not-summed": mistake(
        Topic.MISSING_COMMUNICATION,
        small("tp+sp"),
        breaking.norm_gradient_not_summed,
        Expected("layers.1.ffn_norm", "param_grad", "missing all-reduce", "tp"),
    ),
    "chunks-exchanged": mistake(
        Topic.WRONG_COMMUNICATION,
        small("tp+sp"),
        breaking.chunks_exchanged,
        Expected("layers.1.ffn_norm", "output", "moved"),
    ),
    "sliced-not-scattered": mistake(
        Topic.MISSING_COMMUNICATION,
        small("tp+sp"),
        breaking.unreduced("layers.1.feed_forward.w2"),
        Expected("layers.1.feed_forward.w2", "output", "missing all-reduce", "tp"),
    ),
    "positions-not-offset": mistake(
        Topic.DATA,
        small("cp-gather"),
        breaking.positions_not_offset,
        Expected(".", "buffer", "moved"),
    ),
    "left-out-of-reduction": mistake(
        Topic.MISSING_COMMUNICATION,
        small("cp-ulysses"),
        breaking.left_out_of_reduction("layers.2.attention.wo"),
        Expected("layers.2.attention.wo", "param_grad", "missing all-reduce", "cp"),
    ),
    "divided-twice": mistake(
        Topic.SCALING,
        small("cp-gather"),
        breaking.divided_twice("layers.1.attention.wq.weight"),
        Expected("layers.1.attention.wq", "param_grad", "constant factor", "cp"),
    ),
    "not-synchronised": mistake(
        Topic.MISSING_COMMUNICATION,
        small("ddp"),
        breaking.not_synchronised,
        Expected("tok", "param_grad", "missing average", "dp"),
    ),
    "summed-not-averaged": mistake(
        Topic.SCALING,
        small("ddp", num_microbatches=1),
        breaking.summed_not_averaged,
        Expected("tok", "param_grad", "double reduction", "dp"),
    ),
    "yesterdays-data": mistake(
        Topic.DATA,
        small("ddp"),
        breaking.yesterdays_data,
        Expected(".", "input", "another's values"),
    ),
    "norm-counts-twice": mistake(
        Topic.NORM,
        small("ddp"),
        breaking.counted_twice,
        Expected(".", "grad_norm", "gradient norm", "dp"),
    ),
    "other-max-norm": mistake(
        Topic.NORM,
        small("ddp"),
        breaking.other_max_norm,
        Expected(".", "clip", "clip factor"),
    ),
    "recomputed-otherwise": mistake(
        Topic.DATA,
        small("ddp", recompute="full"),
        breaking.recomputed_otherwise,
        Expected("layers.1.ffn_norm", "recompute_output", "recompute"),
    ),
    "updates-kept": mistake(
        Topic.MISSING_COMMUNICATION,
        small("zero"),
        breaking.no_sharing_of_updates,
        Expected("tok", "update", "not updated"),
    ),
    "shard-without-gradient": mistake(
        Topic.DATA,
        small("fsdp"),
        breaking.shard_without_gradient,
        Expected("layers.2.feed_forward.w2", "param_grad", "some ranks"),
    ),
    "block-not-averaged": mistake(
        Topic.SCALING,
        small("fsdp"),
        breaking.block_not_averaged,
        Expected("layers.1.attention_norm", "param_grad", "double reduction", "dp"),
    ),
    "stale-activations": mistake(
        Topic.DATA,
        small("pp-1f1b"),
        breaking.stale("layers.1"),
        Expected("layers.1", "output", "another's values"),
    ),
    "layer-lost": mistake(
        Topic.DATA,
        small("pp-gpipe"),
        breaking.layer_lost,
        Expected(".", "output", "missing modules"),
        is_early=True,
    ),
    "rows-come-back-shifted": mistake(
        Topic.WRONG_COMMUNICATION,
        small("ep"),
        breaking.rows_come_back_shifted,
        Expected("layers.2.feed_forward.experts", "output", "moved"),
    ),
    "one-expert-lost": mistake(
        Topic.DATA,
        small("ep"),
        breaking.one_expert_lost,
        Expected("layers.1.feed_forward.experts", "param_grad", "some rows"),
    ),
    "experts-divided-twice": mistake(
        Topic.SCALING,
        small("ep"),
        breaking.divided_twice("layers.1.feed_forward.experts.w1"),
        Expected("layers.1.feed_forward.experts", "param_grad", "constant factor", "ep"),
    ),
    "partial-sum-beside-fsdp": mistake(
        Topic.MISSING_COMMUNICATION,
        small("fsdp+tp", 4),
        breaking.unreduced("layers.2.attention.wo"),
        Expected("layers.2.attention.wo", "output", "missing all-reduce", "tp"),
    ),
    "replica-drifts": mistake(
        Topic.WRONG_COMMUNICATION,
        small("hsdp", 4),
        breaking.replica_drifts,
        Expected("layers.2.feed_forward.w2", "param_grad", "replicas differ", "replicate"),
    ),
    "stale-beside-tp": mistake(
        Topic.DATA,
        small("pp+tp", 4),
        breaking.stale("layers.1"),
        Expected("layers.1", "output", "another's values"),
    ),
}
