"""DeepSpeed divides a gradient by the accumulation steps although `scale_wrt_gas=False` says not to; DeepSpeed alone.

python deepspeed_scale_wrt_gas.py
"""

import os
import sys

alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
for name, value in {"DS_ACCELERATOR": "cpu", **alone}.items():
    os.environ.setdefault(name, value)

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled, for minutes
STEPS = 4


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.weight * x).sum()  # the loss, as models of transformers return it


deepspeed.init_distributed(dist_backend="gloo")
for what, change in {"loss": lambda loss: loss, "loss * 1": lambda loss: loss * 1}.items():
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": STEPS}
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(change(engine(torch.ones(3))), scale_wrt_gas=False)
    print(f"backward({what}, scale_wrt_gas=False): gradient {model.weight.grad[0]:g}, should be 1")
