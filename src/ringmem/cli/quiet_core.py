"""Timing where the machine is quiet.

In a virtual machine a core may share its silicon with somebody else's work, and then everything on
it takes up to twice as long, from one moment to the next.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["on_quiet_core"]

_STEPS, _TIMES = 2000, 5  # a twentieth of a millisecond, five times
_TOLERATED = 1.1


@contextmanager
def on_quiet_core() -> Iterator[Callable[[], None]]:
    """Keep this thread on the core that is quickest now, for ours and for the peers alike.

    Yields a function to call before each round: where the core has become slower it chooses again.
    Threads that are started inside stay on the core that was chosen then. Where cores cannot be
    chosen, nothing happens.
    """
    allowed = os.sched_getaffinity(0)
    quickest = float("inf")

    def choose() -> None:
        nonlocal quickest
        with suppress(OSError):
            times = {core: _seconds_on(core) for core in sorted(allowed)}
            best = min(times, key=times.__getitem__)
            os.sched_setaffinity(0, {best})
            quickest = min(quickest, times[best])

    def settle() -> None:
        if _seconds() > _TOLERATED * quickest:
            choose()

    try:
        choose()
        yield settle
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, allowed)


def _seconds_on(core: int) -> float:
    os.sched_setaffinity(0, {core})
    return _seconds()


def _seconds() -> float:
    times = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        for _ in range(_STEPS):
            pass
        times.append(time.perf_counter() - start)
    return statistics.median(times)
