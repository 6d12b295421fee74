"""Megatron-core: ranks, names, layouts, schedules and optimizers of unmodified wheels.

Megatron is only imported if the script has imported it; everything is read from the live objects.
"""
