"""The model of a case, built and trained with megatron-core as in Megatron-LM's training script.

Imported after `install`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from zoo.harness.limits import HANG
from zoo.harness.megatron import versions
from zoo.harness.megatron.case import Case, Step
from zoo.harness.megatron.config import layer_spec, transformer_config
from zoo.harness.megatron.data import Batch, Change, microbatches, num_microbatches

PRISTINE = {
    name: type(value)(value) if isinstance(value, dict | list) else value
    for name, value in vars(parallel_state).items()
    if name.startswith("_") and name.isupper()
}
SMALL_BUCKET = 4000
"""So that there are several, where their reductions overlap."""


@contextmanager
def parallel(case: Case, seed: int = 1234) -> Iterator[None]:
    """Megatron's process groups and random states for a case; undone afterwards, so that the next one may follow."""
    gc.collect()  # a model of an earlier case keeps its groups, and their threads
    groups = set(dist.distributed_c10d._world.pg_map)
    sizes = {
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp if case.vpp > 1 else None,
        "context_parallel_size": case.cp,
        "expert_model_parallel_size": case.ep,
        "distributed_timeout_minutes": int(HANG // 60),
    }
    if case.etp:
        sizes["expert_tensor_parallel_size"] = case.etp
    try:
        versions.call(parallel_state.initialize_model_parallel, **sizes)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield
        dist.barrier()
    finally:
        versions.reset_parallel_state(PRISTINE)
        tensor_parallel.get_cuda_rng_tracker().reset()
        for group in set(dist.distributed_c10d._world.pg_map) - groups:
            dist.destroy_process_group(group)


class Training:
    """A case's model and optimizer, inside `parallel`."""

    def __init__(self, case: Case) -> None:
        assert versions.counts_tokens() or not case.per_token
        self.case = case
        self.config = transformer_config(case)
        self.chunks = [self._wrapped(chunk, number) for number, chunk in enumerate(self._built())]
        self.optimizer = self._optimizer()
        self._tell_schedule()

    @property
    def num_microbatches(self) -> int:
        """On each data-parallel rank."""
        return num_microbatches(self.case, parallel_state.get_data_parallel_world_size())

    def step(self, number: int = 0, batch: Change = dict) -> Step:
        """One optimizer update, as `train_step` of Megatron-LM; `batch` may change each microbatch."""
        for chunk in self.chunks:
            versions.zero_grads(chunk)
        self.optimizer.zero_grad()
        reports = self.forward_backward(number, batch)
        updated, grad_norm, _ = self.optimizer.step()
        return Step(_mean_loss(reports, together=self.case.per_token), grad_norm, bool(updated))

    def forward_backward(self, number: int = 0, batch: Change = dict) -> list[torch.Tensor]:
        """All microbatches; sum and count of losses for each one, on the last stage."""
        case = self.case
        rank, num_ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        data = [map(batch, microbatches(case, number, rank, num_ranks)) for _ in self.chunks]
        reports: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=data if len(data) > 1 else data[0],
            model=self.chunks if len(data) > 1 else self.chunks[0],
            num_microbatches=self.num_microbatches,
            seq_length=case.length,
            micro_batch_size=case.micro,
            decoder_seq_length=case.length,
            forward_only=False,
        )
        return reports

    def _forward(self, data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = versions.batch_on_this_cp_rank(next(data))
        output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
        return output, partial(_loss, batch["loss_mask"])

    def _built(self) -> Iterator[Any]:
        for number in range(self.case.vpp):
            where = versions.chunk_place(number, self.case.vpp)
            model = versions.call(
                GPTModel,
                config=self.config,
                transformer_layer_spec=layer_spec(self.case, self.config, where.vp_stage),
                vocab_size=self.case.vocab,
                max_sequence_length=self.case.length,
                pre_process=where.is_first,
                post_process=where.is_last,
                share_embeddings_and_output_weights=self.case.tied,
                position_embedding_type="rope" if self.case.rope or self.case.mla else "learned_absolute",
                vp_stage=where.vp_stage,
            )
            for parameter in model.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            yield model if self.case.dtype == "float32" else Float16Module(self.config, model)

    def _wrapped(self, chunk: Any, number: int) -> Any:
        case = self.case
        return versions.data_parallel(
            self.config,
            chunk,
            disable_bucketing=number > 0,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=case.overlap_grads,
            overlap_param_gather=case.overlap_params,
            use_distributed_optimizer=case.zero,
            check_for_nan_in_grad=False,
            bucket_size=SMALL_BUCKET if case.overlap_grads else None,
        )

    def _optimizer(self) -> Any:
        case = self.case
        return versions.optimizer(
            self.chunks,
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.01,
            clip_grad=case.clip,
            bf16=case.dtype == "bfloat16",
            fp16=case.dtype == "float16",
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=case.zero,
            initial_loss_scale=256.0,
            min_loss_scale=1.0,
            overlap_param_gather=case.overlap_params,
        )

    def _tell_schedule(self) -> None:
        """What Megatron-LM's `train` writes into the config."""
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if self.case.overlap_grads:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]


def _loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    """Megatron-LM's `loss_func`."""
    mask = loss_mask.view(-1)
    total = (output.view(-1).float() * mask).sum()
    count = mask.sum()
    report = torch.stack([total.detach(), count])
    dist.all_reduce(report, group=parallel_state.get_context_parallel_group())
    return versions.loss_outputs(total, count, report)


def _mean_loss(reports: list[torch.Tensor], *, together: bool) -> float:
    """Over the whole batch: of microbatches' means, or of all tokens together."""
    parts = [report if together else torch.stack([report[0] / report[1], torch.tensor(1.0)]) for report in reports]
    total = torch.stack(parts).sum(0) if parts else torch.zeros(2)
    dist.all_reduce(total)  # replicas count alike
    return float(total[0] / total[1])
