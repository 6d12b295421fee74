"""Is inference the model that is trained? Log-probabilities of one forward pass, against generation with a cache.

Run alone, this is the trainer: one call for the whole sequence. `--generate dynamic` or `--generate static` is the
rollout: transformers' `generate`, which is made to choose the same tokens. `--prefill 4` fills the cache in chunks.
`--bug temperature` scores the rollout's tokens at the temperature of sampling, `--bug positions` counts padding.
"""

import argparse

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

import ttrace  # 1

VOCAB, PROMPT, LENGTH, PADDING = 64, 9, 16, 3
parser = argparse.ArgumentParser()
parser.add_argument("--generate", choices=("dynamic", "static"))
parser.add_argument("--prefill", type=int)
parser.add_argument("--bug", choices=("temperature", "positions"))
args = parser.parse_args()


class LogProbs(nn.Module):
    """The log-probabilities of tokens that were chosen, from the logits that were there before them."""

    def forward(self, logits, tokens):
        if args.bug == "temperature" and args.generate:
            logits = logits / 0.7
        return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


class Forced(LogitsProcessor):
    """Chooses the tokens that are given, and scores them as generation sees them."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, ids, logits):
        chosen = self.tokens[:, ids.shape[1]]
        policy["logprobs"](logits[:, None], chosen[:, None])
        return torch.full_like(logits, -torch.inf).scatter(1, chosen[:, None], 0.0)


config = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
torch.manual_seed(0)
policy = nn.ModuleDict({"model": LlamaForCausalLM(config), "logprobs": LogProbs()}).eval()
session = ttrace.attach(policy)  # 2
for _ in range(8):
    with session.step(), torch.no_grad():  # 3
        tokens = session.batch({"ids": torch.randint(VOCAB, (2, LENGTH))})["ids"]  # 4
        mask = torch.ones_like(tokens)
        mask[1, :PADDING] = 0  # the second prompt is shorter, and padded on the left
        if args.generate:
            policy["model"].generate(
                tokens[:, :PROMPT],
                attention_mask=torch.ones_like(mask)[:, :PROMPT] if args.bug == "positions" else mask[:, :PROMPT],
                logits_processor=[Forced(tokens)],
                max_new_tokens=LENGTH - PROMPT,
                do_sample=False,
                cache_implementation="static" if args.generate == "static" else None,
                prefill_chunk_size=args.prefill,
            )
        else:
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            given = {"attention_mask": mask[:, :-1], "position_ids": positions[:, :-1]}
            logits = policy["model"](tokens[:, :-1], **given, logits_to_keep=LENGTH - PROMPT, use_cache=False).logits
            policy["logprobs"](logits, tokens[:, PROMPT:])
