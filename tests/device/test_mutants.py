"""Mistakes that recording on a device invites: each is made, and must be noticed.

The same step is recorded by a recorder with one mistake, and held against what the host recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.device_steps import EMU, list_differences, trace_step
from ttrace.capture.probes import generator
from ttrace.errors import TTraceError
from ttrace.trace import background_writer
from ttrace.trace.background_writer import BackgroundWriter
from ttrace.trace.tensor_bytes import Change, CopyStreams, PinnedChunk

Patch = Callable[[pytest.MonkeyPatch], None]
LATE, LATE_DEFAULT, LATE_SIDE = (1000, 1000), (1000, 0), (0, 1000)
LITTLE = 256 << 10


def skip_wait_for_producer(patch: pytest.MonkeyPatch) -> None:
    def copy(self: CopyStreams, source: torch.Tensor, target: torch.Tensor, change: Change) -> None:  # noqa: ARG001
        stream = self._streams.setdefault(source.device, torch.Stream(source.device))
        source = source.clone()
        with stream:
            target.copy_(source, non_blocking=True)
        source.record_stream(stream)
        self._used.add(stream)

    patch.setattr(CopyStreams, "copy", copy)


def skip_record_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)  # noqa: ARG005


def skip_arrival(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PinnedChunk, "wait", lambda self: None)  # noqa: ARG005


def skip_snapshot(patch: pytest.MonkeyPatch) -> None:
    _replace_change(patch, Change.SOON)


def skip_wait_for_copy(patch: pytest.MonkeyPatch) -> None:
    _replace_change(patch, Change.LATER)


def _replace_change(patch: pytest.MonkeyPatch, wrong: Change) -> None:
    own = CopyStreams.copy

    def copy(self: CopyStreams, source: torch.Tensor, target: torch.Tensor, change: Change) -> None:
        own(self, source, target, Change.NEVER if change is wrong else change)

    patch.setattr(CopyStreams, "copy", copy)


def copy_on_current_stream(patch: pytest.MonkeyPatch) -> None:
    def copy(self: CopyStreams, source: torch.Tensor, target: torch.Tensor, change: Change) -> None:  # noqa: ARG001
        stream = self._streams.setdefault(source.device, torch.Stream(source.device))
        target.copy_(source, non_blocking=True)
        self._used.add(stream)

    patch.setattr(CopyStreams, "copy", copy)


def ask_current_device_for_stream(patch: pytest.MonkeyPatch) -> None:
    own = torch.accelerator.current_stream
    patch.setattr(torch.accelerator, "current_stream", lambda device=None: own())  # noqa: ARG005


def record_events_early(patch: pytest.MonkeyPatch) -> None:
    own = CopyStreams.copy
    early: dict[int, torch.Event] = {}

    def copy(self: CopyStreams, source: torch.Tensor, target: torch.Tensor, change: Change) -> None:
        stream = self._streams.setdefault(source.device, torch.Stream(source.device))
        if stream not in self._used:
            early[id(stream)] = stream.record_event()
        own(self, source, target, change)

    def record_events(self: CopyStreams) -> list[torch.Event]:
        events = [early[id(stream)] for stream in self._used]
        self._used.clear()
        return events

    patch.setattr(CopyStreams, "copy", copy)
    patch.setattr(CopyStreams, "record_events", record_events)


def wait_for_one_device(patch: pytest.MonkeyPatch) -> None:
    own = CopyStreams.record_events
    patch.setattr(CopyStreams, "record_events", lambda self: own(self)[:1])


def reuse_chunk_at_once(patch: pytest.MonkeyPatch) -> None:
    own = BackgroundWriter._seal

    def seal(self: BackgroundWriter) -> None:
        chunk = self._filled.chunk
        own(self)
        if chunk is not None:
            chunk.clear()
            self._free.append(chunk)

    patch.setattr(BackgroundWriter, "_seal", seal)
    patch.setattr(BackgroundWriter, "_release", lambda self, batch: None)  # noqa: ARG005


def release_part_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    def read_parts(self: BackgroundWriter, num_bytes: int) -> Iterator[memoryview]:
        while num_bytes:
            batch = self._next_batch()
            assert batch is not None
            assert batch.chunk is not None
            num_bytes -= batch.part
            self._release(batch)
            batch.chunk.memory.fill_(255)  # as the next copy would
            yield batch.chunk.read(0, batch.part)

    patch.setattr(BackgroundWriter, "_read_parts", read_parts)


def flush_without_waiting(patch: pytest.MonkeyPatch) -> None:
    def close(self: BackgroundWriter, end: Any) -> None:
        self._seal()
        self._batches.clear()
        self._stop()
        self._writer.close(end)

    patch.setattr(BackgroundWriter, "flush", lambda self: None)  # noqa: ARG005
    patch.setattr(BackgroundWriter, "close", close)


def keep_gradient_without_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "clone", lambda self, **_: self)


def read_numbers_early(patch: pytest.MonkeyPatch) -> None:
    own = generator._stack
    patch.setattr(generator, "_stack", lambda numbers: own(numbers).to("cpu", non_blocking=True))


def read_batch_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        generator, "copy_to_host", lambda tensors: [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    )


def flatten_on_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        background_writer,
        "_view_bytes",
        lambda tensor: tensor.detach().to("cpu", non_blocking=True).contiguous().view(-1).view(torch.uint8),
    )


MUTANTS: dict[Patch, tuple[tuple[int, int], dict[str, Any]]] = {
    skip_wait_for_producer: (LATE_DEFAULT, {}),
    skip_record_stream: (LATE_SIDE, {}),
    skip_arrival: (LATE, {}),
    skip_snapshot: (LATE_SIDE, {}),
    skip_wait_for_copy: (LATE_SIDE, {}),
    copy_on_current_stream: (LATE_DEFAULT, {}),
    ask_current_device_for_stream: (LATE_DEFAULT, {}),
    record_events_early: (LATE, {}),
    wait_for_one_device: (LATE, {"head": "emu:0"}),
    reuse_chunk_at_once: (LATE, {"max_bytes_held": LITTLE}),
    release_part_before_it_is_written: ((0, 0), {"max_bytes_held": LITTLE}),
    flush_without_waiting: (LATE, {}),
    keep_gradient_without_copy: (LATE_SIDE, {}),
    read_numbers_early: (LATE, {}),
    read_batch_early: (LATE, {}),
    flatten_on_the_host: (LATE, {}),
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trace_step(tmp_path_factory.mktemp("host"), "cpu")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_noticed(mutant: Patch, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lag, settings = MUTANTS[mutant]
    EMU.set_lag(*lag)
    try:
        with monkeypatch.context() as patch:
            mutant(patch)
            with contextlib.suppress(RuntimeError, AssertionError, ValueError, TTraceError):  # a crash is noticed, too
                trace = trace_step(tmp_path, "emu:1", **settings)
                assert not list_differences(host, trace, atol=1e-6, in_order="head" not in settings)
                pytest.fail(f"{mutant.__name__} changes nothing")
    finally:
        for device in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(device)
        EMU.set_lag(20)
