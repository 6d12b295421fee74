"""What DeepSpeed needs where there is no accelerator: import it from here."""

import importlib
import os

import one_process  # noqa: F401

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # noqa: F401

importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # it would be compiled, for minutes
