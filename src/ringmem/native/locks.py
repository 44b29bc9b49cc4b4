"""The lock of everything that a forked child may inherit."""

from __future__ import annotations

import threading

from ringmem.native import _native

__all__ = ["Lock"]


class Lock:
    """A re-entrant lock that a forked child finds open.

    At the fork another thread may have held it, which the child lacks: nobody would let go.
    Finalizers may come while their own thread holds it.
    """

    __slots__ = ("_by_fork",)

    def __init__(self) -> None:
        self._by_fork = {_native.forks(): threading.RLock()}

    def _lock(self) -> threading.RLock:
        forks = _native.forks()
        # setdefault: of two threads that come first, both get the lock of one.
        return self._by_fork.get(forks) or self._by_fork.setdefault(forks, threading.RLock())

    def acquire(self, *, blocking: bool = True) -> bool:
        """Return whether the calling thread holds it now."""
        return self._lock().acquire(blocking=blocking)

    def release(self) -> None:
        """Let the next thread in, once for every `acquire`."""
        self._lock().release()

    def __enter__(self) -> None:
        self._lock().acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock().release()
