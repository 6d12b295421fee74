"""The commands, one file each: they read options, call what does the work, and report how it ended.

Modules that import torch are imported inside the functions (ttrace/cli/entry.py explains why).
"""
