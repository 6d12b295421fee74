"""DeepSpeed: its engine, and the optimizers of ZeRO, which flatten, partition and copy parameters."""
