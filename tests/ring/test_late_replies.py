"""Replies that come after their call gave up: dropped, and never shown to whoever reads next."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import handlers_for_tests as h
import numpy as np
import pytest
from handlers_for_tests import ECHO, first, message, native_echo

import ringmem
from ringmem.ring import RingKernel

LATE, WANTED = 100, 7


def answer(value: int) -> int:
    return value * 3 + 1


def read_poll(kernel: RingKernel) -> list[int]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = [first(reply) for view in kernel.poll() for reply in view]
        if found:
            kernel.release()
            return found
    return []


def read_into(kernel: RingKernel) -> list[int]:
    out = np.zeros(4, ECHO)
    return [first(reply) for reply in out[: kernel.recv_into(out, 10)]]


def read_async(kernel: RingKernel) -> list[int]:
    async def main() -> list[int]:
        async for batch in kernel.aio:
            return [first(reply) for reply in batch]
        return []

    return asyncio.run(asyncio.wait_for(main(), 10))


READERS: dict[str, Callable[[RingKernel], list[int]]] = {
    "recv": lambda kernel: [first(reply) for reply in kernel.recv(timeout_s=10)],
    "recv of one": lambda kernel: [first(reply) for reply in kernel.recv(1, 10)],
    "recv_into": read_into,
    "poll": read_poll,
    "async for": read_async,
}


@contextmanager
def resumed_after(kernel: RingKernel, seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, kernel.resume)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("calls", [1, 3])
def test_whoever_waits_when_a_late_reply_comes_does_not_get_it(
    read: Callable[[RingKernel], list[int]], calls: int
) -> None:
    with native_echo(capacity=8) as kernel:
        kernel.pause()
        for _ in range(calls):
            with pytest.raises(ringmem.TimeoutError, match="dropped when it comes"):
                kernel.call(message(LATE), 0.01)
        assert kernel.send(message(WANTED)) == 1
        assert kernel.unread() == 1
        with resumed_after(kernel, 0.1):
            assert read(kernel) == [answer(WANTED)]
        assert kernel.unread() == 0
        assert first(kernel.call(message(1), 5)) == answer(1)


@pytest.mark.parametrize("spin_us", [-1, 0, 50])
def test_late_replies_that_come_one_by_one_end_no_wait(spin_us: float) -> None:
    with RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu", spin_us=spin_us) as kernel:
        for _ in range(3):
            with pytest.raises(ringmem.TimeoutError):
                kernel.call((LATE, 1), 0.001)
        kernel.send((WANTED, 0))
        began = time.monotonic()
        assert len(kernel.recv(timeout_s=20)) == 1
        assert time.monotonic() - began > 0.2  # behind the three
        assert kernel.unread() == 0


def test_a_wait_for_less_than_the_late_reply_times_out() -> None:
    with native_echo() as kernel:
        kernel.pause()
        with pytest.raises(ringmem.TimeoutError):
            kernel.call(message(LATE), 0.01)
        with resumed_after(kernel, 0.05), pytest.raises(ringmem.TimeoutError):
            kernel.recv(timeout_s=0.3)
        assert kernel.unread() == 0
        assert first(kernel.call(message(1), 5)) == answer(1)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_replies_of_a_closed_event_loop_are_read_by_nobody(
    read: Callable[[RingKernel], list[int]],
) -> None:
    async def give_up(kernel: RingKernel) -> None:
        replies = [kernel.aio.call(message(LATE + i)) for i in range(5)]  # two sent, three wait
        kernel.aio.close()
        found = await asyncio.gather(*replies, return_exceptions=True)
        assert [type(one) for one in found] == [ringmem.ClosedError] * 5

    with native_echo(capacity=2) as kernel:
        kernel.pause()
        asyncio.run(give_up(kernel))
        assert kernel.unread() == 0
        with resumed_after(kernel, 0.1):
            kernel.send(message(WANTED), 10)
            assert read(kernel) == [answer(WANTED)]
        assert kernel.unread() == 0
        assert first(kernel.call(message(1), 5)) == answer(1)


def give_up(kernel: RingKernel, calls: int) -> None:
    for _ in range(calls):
        with pytest.raises(ringmem.TimeoutError, match="dropped when it comes"):
            kernel.call(message(LATE), 0.01)


def test_late_replies_that_fill_their_ring_hold_up_neither_drain_nor_send() -> None:
    with native_echo(capacity=2) as kernel:
        kernel.pause()
        give_up(kernel, 2)
        with resumed_after(kernel, 0.1):
            assert kernel.send([message(i) for i in range(2)], 10) == 2  # behind two of two
        kernel.drain(10)
        assert [first(reply) for reply in kernel.recv(timeout_s=5)] == [answer(0), answer(1)]


def test_a_call_finds_room_behind_late_replies_and_its_time_counts_once() -> None:
    with native_echo(capacity=1) as kernel:
        kernel.pause()
        give_up(kernel, 1)
        with pytest.raises(ringmem.TimeoutError, match="no free slot within timeout_s=0.3"):
            kernel.call(message(LATE), 0.3)
        with resumed_after(kernel, 0.2):
            assert first(kernel.call(message(WANTED), 10)) == answer(WANTED)
    with RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu", capacity=1) as slow:
        with pytest.raises(ringmem.TimeoutError):
            slow.call((0, 5), 0.01)
        began = time.monotonic()
        with pytest.raises(ringmem.TimeoutError):  # 0.5 s for room, and 0.5 s for the reply
            slow.call((0, 5), 0.7)
        assert time.monotonic() - began < 0.9


def test_a_drained_kernel_ends_the_reader_after_late_replies() -> None:
    with native_echo() as kernel:
        kernel.pause()
        with pytest.raises(ringmem.TimeoutError):
            kernel.call(message(LATE), 0.01)
        kernel.resume()
        kernel.drain(10)
        with pytest.raises(ringmem.ClosedError):
            kernel.recv(timeout_s=5)
        assert kernel.unread() == 0
