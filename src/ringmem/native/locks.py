"""The lock of everything that a forked child may inherit."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

__all__ = ["Lock"]

if TYPE_CHECKING:

    class _RLock:
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
        def release(self) -> None: ...
        def __enter__(self) -> bool: ...
        def __exit__(self, *raised: object) -> None: ...
        def _at_fork_reinit(self) -> None: ...

else:
    _RLock = type(threading.RLock())

_all: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock(_RLock):
    """A re-entrant lock that a forked child finds open.

    At the fork another thread may have held it, which the child lacks: nobody would let go.
    Finalizers may come while their own thread holds it. It is CPython's own, so that no signal
    comes between taking it and the ``with`` block.
    """

    def __new__(cls) -> Lock:  # noqa: D102 - as any lock is made
        made = super().__new__(cls)
        if not _all:
            _watch_forks()
        _all.add(made)
        return made


_watched = False


def _watch_forks() -> None:
    global _watched
    if not _watched:
        _watched = True
        os.register_at_fork(after_in_child=_open_all)


def _open_all() -> None:
    for lock in list(_all):
        lock._at_fork_reinit()  # what CPython's threading and logging do for theirs
