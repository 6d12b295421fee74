"""A GPT built from megatron.core and trained as in Megatron-LM. The three lines for TTrace are numbered."""

import argparse
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

import ttrace  # 1

VOCAB, LENGTH, SAMPLES, MICRO = 64, 16, 8, 2
"""SAMPLES are those of a step, whatever the layout; MICRO those of a microbatch."""


def main() -> None:
    args = arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    model, optimizer = build(args)
    session = ttrace.attach(model, optimizer)  # 2
    for step in range(10):
        with session.step():  # 3
            loss = train_step(model, optimizer, step)
        if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
            print(f"step {step}: loss {loss:.4f}")
    dist.destroy_process_group()


def build(args: argparse.Namespace) -> tuple[list[torch.nn.Module], object]:
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        sequence_parallel=args.sp,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        finalize_model_grads_func=finalize_model_grads,
    )
    chunk: torch.nn.Module = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).cuda()
    if args.bf16:
        chunk = Float16Module(config, chunk)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=args.zero)
    model = [DistributedDataParallel(config, ddp_config, chunk)]
    optimizer_config = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=args.bf16, params_dtype=dtype, use_distributed_optimizer=args.zero
    )
    return model, get_megatron_optimizer(optimizer_config, model)


def train_step(model: list[torch.nn.Module], optimizer: object, step: int) -> float:
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    num_microbatches = SAMPLES // MICRO // parallel_state.get_data_parallel_world_size()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=microbatches(step, num_microbatches),
        model=model,
        num_microbatches=num_microbatches,
        seq_length=LENGTH,
        micro_batch_size=MICRO,
        forward_only=False,
    )
    optimizer.step()
    return float(torch.stack(losses).mean()) if losses else 0.0


def forward_step(data, model):
    tokens = next(data).cuda()
    positions = torch.arange(LENGTH, device=tokens.device)
    mask = (positions > positions[:, None])[None, None]
    output = model(tokens[:, :-1], positions.expand(MICRO, -1), mask, labels=tokens[:, 1:])
    return output, partial(mean_loss)


def mean_loss(output):
    loss = output.float().mean()
    return loss, loss.detach().clone()


def microbatches(step: int, number: int):
    """Yield this rank's microbatches. Data-parallel ranks take turns, so every layout trains on the same samples."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for i in range(number):
        generator = torch.Generator().manual_seed(step * SAMPLES + i * ranks + rank)
        yield torch.randint(VOCAB, (MICRO, LENGTH + 1), generator=generator)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1, help="tensor parallelism")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    parser.add_argument("--zero", action="store_true", help="the distributed optimizer")
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
