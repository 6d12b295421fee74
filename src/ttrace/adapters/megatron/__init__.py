"""Megatron-core: ranks, names, layouts, schedules and optimizers of unmodified wheels.

Nothing of Megatron is imported unless a script has done so; what is read of it is read from the live objects.
"""
