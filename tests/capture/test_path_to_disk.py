"""The path of a tensor from a module's forward hook to the trace is short (docs/develop/record.md shows it)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import ttrace
from ttrace.capture.observe.hooks import Hooks
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.trace.buffered_file import BufferedFile
from zoo.harness.runs import SimulatedRank

OWN = str(Path(ttrace.__file__).parent)


def read_stack(frame: FrameType | None) -> list[CodeType]:
    """The functions of the package on the stack, from a forward hook to this frame; empty if no hook led here."""
    stack: list[CodeType] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(OWN):
            stack.insert(0, frame.f_code)
        if frame.f_code is Hooks._after.__code__:
            # What torch calls is the hook; a wrapper around it, if any, is a frame as well.
            outer = frame.f_back
            while outer is not None and outer.f_code.co_filename.startswith(OWN):
                stack.insert(0, outer.f_code)
                outer = outer.f_back
            return stack
        frame = frame.f_back
    return []


def test_a_forward_hook_reaches_the_disk_in_eight_calls_over_five_files(tmp_path: Path) -> None:
    """Count the functions of `src/ttrace` on the stack, from the hook that torch calls to the append to the file.

    Both ends count. `BufferedFile.append` copies the bytes into the arena, which mirrors the file; a thread writes full
    buffers from there, so this is where the chain of the training thread ends.
    """
    stacks: set[tuple[CodeType, ...]] = set()

    def observe(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is BufferedFile.append.__code__ and (stack := read_stack(frame)):
            stacks.add(tuple(stack))

    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    session = TracingSession(SessionParts(Plan(out=tmp_path, stop=False), model, None, SimulatedRank()))
    with session.step():
        sys.setprofile(observe)
        try:
            model(torch.randn(3, 4)).sum().backward()
        finally:
            sys.setprofile(None)
    session.close()
    assert stacks
    for stack in stacks:
        names = [f"{Path(code.co_filename).name}: {code.co_name}" for code in stack]
        assert len(stack) <= 8, names
        assert len({code.co_filename for code in stack}) <= 5, names
