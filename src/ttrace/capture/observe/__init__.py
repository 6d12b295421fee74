"""Observers of a running step: hooks on modules, patches of torch functions, counters of steps and calls."""
