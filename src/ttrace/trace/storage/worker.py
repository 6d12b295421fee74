"""Thread that works beside the training step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Worker:
    """One thread, which does one thing after the other.

    A step may end when its script does. The interpreter starts no thread then, so the caller works itself.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)  # starts with the first task

    def submit(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        try:
            return self._pool.submit(task, *arguments)
        except RuntimeError:  # the interpreter is ending; tasks that were submitted before are done
            done: Future[Any] = Future()
            try:
                done.set_result(task(*arguments))
            except Exception as error:
                done.set_exception(error)
            return done

    def close(self) -> None:
        """Wait for everything that was submitted."""
        self._pool.shutdown()
