"""Timing where the machine is quiet.

In a virtual machine a core may share its silicon with somebody else's work, and then everything on
it takes up to twice as long, from one second to the next.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["on_quiet_core"]

_STEPS, _TIMES = 4000, 5  # a tenth of a millisecond, five times


@contextmanager
def on_quiet_core() -> Iterator[None]:
    """Keep this thread on the core that is quickest now, for ours and for the peers alike.

    Threads that are started inside stay on that core too. Where cores cannot be chosen, nothing
    happens.
    """
    allowed = os.sched_getaffinity(0)
    try:
        with suppress(OSError):
            os.sched_setaffinity(0, {min(sorted(allowed), key=_seconds_on)})
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, allowed)


def _seconds_on(core: int) -> float:
    os.sched_setaffinity(0, {core})
    times = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        for _ in range(_STEPS):
            pass
        times.append(time.perf_counter() - start)
    return statistics.median(times)
