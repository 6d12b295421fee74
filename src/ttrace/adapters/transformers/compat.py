"""Private APIs of transformers, all in one place.

Each entry says in which versions it was seen and what happens without it.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def find_device_mesh(model: nn.Module) -> DeviceMesh | None:
    """Find the mesh that a model was loaded onto, even if no parameter lies on it.

    `PreTrainedModel._device_mesh`, in 5.22. Without it the mesh is that of the parameters, and a model whose plan
    distributes no parameter has none.
    """
    mesh = getattr(model, "_device_mesh", None)
    return mesh if isinstance(mesh, DeviceMesh) else None


def has_experts(module: nn.Module) -> bool:
    """Whether a module computes several experts: `_is_expert_parallel`, in 5.22.

    The decorator of all experts' classes sets it. Without it modules inside experts are traced, whose rows come in an
    order of their own.
    """
    return hasattr(module, "_is_expert_parallel")
