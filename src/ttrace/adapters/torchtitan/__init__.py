"""torchtitan: its models are plain PyTorch, with layouts that may be kept by spmd_types."""
