"""Megatron-core: ranks, names, layouts, schedules and optimizers of unmodified wheels.

No part of Megatron is imported unless a script has done so; everything is read from the live objects.
"""
