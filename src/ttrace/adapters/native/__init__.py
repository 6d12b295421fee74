"""Plain PyTorch: ordinary modules, DTensor, FSDP2, DDP, pipelining, context parallelism."""
