"""Patches are put back: in reverse order, whatever happens, and as they were found."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from ttrace.patches import OutermostCall, Patches, SharedPatches


class Owner:
    def method(self) -> str:
        return "own"


class Heir(Owner):
    pass


def test_what_was_there_comes_back() -> None:
    patches, module = Patches(), SimpleNamespace(value=1)
    patches.replace(module, "value", 2)
    patches.replace(module, "value", 3)
    assert module.value == 3
    patches.remove()
    assert module.value == 1


def test_what_was_inherited_is_inherited_again() -> None:
    patches, heir = Patches(), Heir()
    patches.wrap(Heir, "method", lambda own: lambda self: own(self) + " of the class")
    patches.wrap(heir, "method", lambda own: lambda: own() + " of the object")
    assert heir.method() == "own of the class of the object"
    patches.remove()
    assert heir.method() == "own"
    assert "method" not in vars(Heir)
    assert "method" not in vars(heir)


def test_a_patch_wraps_what_is_there_at_that_moment() -> None:
    module = SimpleNamespace(value=1)
    shared = SharedPatches(lambda patches: patches.wrap(module, "value", lambda own: own + 10))
    module.value = 5
    shared.acquire()
    assert module.value == 15
    shared.release()
    assert module.value == 5


def test_one_that_fails_does_not_keep_the_others() -> None:
    patches, module = Patches(), SimpleNamespace(value=1)
    patches.replace(module, "value", 2)
    patches.on_remove(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        patches.remove()
    assert module.value == 1
    patches.remove()


def test_an_installation_that_fails_leaves_nothing() -> None:
    module = SimpleNamespace(value=1)

    def install(patches: Patches) -> None:
        patches.replace(module, "value", 2)
        raise RuntimeError

    shared = SharedPatches(install)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            shared.acquire()
        assert module.value == 1


def test_users_in_threads_share_patches_until_the_last_is_through() -> None:
    module = SimpleNamespace(value=0)
    shared = SharedPatches(lambda patches: patches.wrap(module, "value", lambda own: own + 1))
    is_in, may_leave = threading.Event(), threading.Event()

    def use() -> None:
        shared.acquire()
        is_in.set()
        may_leave.wait(60)
        shared.release()

    thread = threading.Thread(target=use)
    shared.acquire()
    thread.start()
    assert is_in.wait(60)
    shared.release()
    assert module.value == 1
    may_leave.set()
    thread.join()
    assert module.value == 0


def test_only_the_outermost_call_is_the_scripts() -> None:
    script, seen = OutermostCall(), []

    def inner() -> None:
        seen.append(script.is_running)
        if not script.is_running:
            script.run(inner)

    inner()
    assert seen == [False, True]
    with pytest.raises(ZeroDivisionError):
        script.run(lambda: 1 // 0)
    assert not script.is_running
