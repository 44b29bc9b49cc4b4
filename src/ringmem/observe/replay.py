"""Replay of a trace on an allocator, timed event by event."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from ringmem.native.errors import InvalidValueError
from ringmem.observe.trace import ALLOCATE, FREE_REQUESTED, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ReplayTimes", "replay"]

BlockT = TypeVar("BlockT")
StreamT = TypeVar("StreamT")

_PROGRESS_EVERY = 512  # events


@dataclass(frozen=True, eq=False)
class ReplayTimes(Generic[BlockT, StreamT]):
    """What a replay took.

    Attributes
    ----------
    seconds : float
        The whole of it, the bookkeeping of the replay included.
    allocate_ns, free_ns : ndarray of int64
        Nanoseconds of each call on the host, in the order of the trace.
    remaining : list of tuple of (block, stream)
        What the trace never frees; the caller does.
    """

    seconds: float
    allocate_ns: NDArray[np.int64]
    free_ns: NDArray[np.int64]
    remaining: list[tuple[BlockT, StreamT]]


def replay(
    trace: Trace,
    allocate: Callable[[int, StreamT], BlockT],
    free: Callable[[BlockT, StreamT], object],
    streams: Sequence[StreamT],
    progress: Callable[[int], object] | None = None,
) -> ReplayTimes[BlockT, StreamT]:
    """Allocate and free as the traced program did.

    Nothing is waited for: a free is requested in the order of its stream, and the completions that
    the trace recorded (kind 3) are skipped, for the allocator at hand has its own.

    Parameters
    ----------
    trace : Trace
        What to do.
    allocate : callable
        ``allocate(nbytes, stream)`` returns a block.
    free : callable
        ``free(block, stream)`` gives it back in the order of the stream.
    streams : sequence
        One for each stream of the trace.
    progress : callable, optional
        Called now and then with the number of events done.

    Returns
    -------
    ReplayTimes

    Raises
    ------
    InvalidValueError
        There are fewer streams than the trace uses.
    Exception
        What `allocate` or `free` raised. Everything allocated so far has been freed by then.

    Examples
    --------
    >>> from ringmem.observe import Trace, replay
    >>> trace = Trace.from_arrays(kind=[1, 1, 2], id=[0, 1, 0], size=[512, 64, 0])
    >>> times = replay(trace, lambda nbytes, stream: bytearray(nbytes), lambda block, stream: None,
    ...                streams=[None])
    >>> len(times.allocate_ns), len(times.free_ns), [len(block) for block, _ in times.remaining]
    (2, 1, [64])
    """
    if len(streams) < trace.streams:
        raise InvalidValueError(
            f"streams has {len(streams)} entries; the trace uses {trace.streams}"
        )
    live: dict[int, tuple[BlockT, StreamT]] = {}
    try:
        return _run(trace, allocate, free, streams, progress, live)
    except BaseException:
        for block, stream in live.values():
            with contextlib.suppress(Exception):  # what went wrong first is what to hear about
                free(block, stream)
        raise


def _run(
    trace: Trace,
    allocate: Callable[[int, StreamT], BlockT],
    free: Callable[[BlockT, StreamT], object],
    streams: Sequence[StreamT],
    progress: Callable[[int], object] | None,
    live: dict[int, tuple[BlockT, StreamT]],
) -> ReplayTimes[BlockT, StreamT]:
    allocated: list[int] = []
    freed: list[int] = []
    now = time.perf_counter_ns
    events = zip(
        trace.kind.tolist(), trace.id.tolist(), trace.size.tolist(), trace.stream.tolist(),
        strict=True,
    )  # fmt: skip
    begin = now()
    for number, (kind, id_, size, stream_number) in enumerate(events):
        stream = streams[stream_number]
        if kind == ALLOCATE:
            start = now()
            block = allocate(size, stream)
            allocated.append(now() - start)
            live[id_] = (block, stream)
        elif kind == FREE_REQUESTED:
            block = live.pop(id_)[0]
            start = now()
            free(block, stream)
            freed.append(now() - start)
        if progress is not None and number % _PROGRESS_EVERY == 0:
            progress(number)
    return ReplayTimes(
        seconds=(now() - begin) / 1e9,
        allocate_ns=np.array(allocated, np.int64),
        free_ns=np.array(freed, np.int64),
        remaining=list(live.values()),
    )
