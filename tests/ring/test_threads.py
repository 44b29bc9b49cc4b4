"""Rings and ring kernels from several threads: refused, or right; never half a message."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import numpy as np
import pytest
from handlers_for_tests import ECHO, first, message, native_echo

from ringmem import ClosedError, InvalidValueError, RingmemError
from ringmem.ring import Ring, RingKernel

# --- rings ---------------------------------------------------------------------------------------


def test_an_end_that_several_threads_use_takes_whole_messages_or_refuses(hammer: Any) -> None:
    wide = np.dtype([("words", "u8", (20,))])
    with Ring(wide, 64) as ring, ring.producer("refuse") as producer, ring.consumer() as consumer:
        accepted, received, refused = [0] * 2, [], []

        def send(index: int) -> Any:
            def body(number: int) -> None:
                batch = np.zeros(3, wide)
                batch["words"] = 2 * number + index
                try:
                    accepted[index] += producer.send(batch)
                except RingmemError as error:
                    refused.append(str(error))

            return body

        def receive(number: int) -> None:
            try:
                received.append(consumer.recv(timeout_s=0))
            except RingmemError as error:
                refused.append(str(error))

        assert hammer.repeat(send(0), send(1), receive, receive) == []
        received.append(consumer.recv(timeout_s=0))
        messages = np.concatenate(received)
        assert len(messages) == sum(accepted)
        assert (messages["words"] == messages["words"][:, :1]).all()
        assert all("one thread at a time" in text for text in refused), set(refused)
        assert len(messages) > 0


def test_one_of_many_threads_gets_an_end(hammer: Any) -> None:
    for _ in range(60):
        with Ring("u8", 8) as ring:
            ends: list[Any] = []

            def attach(ring: Ring = ring, ends: list[Any] = ends) -> None:
                with contextlib.suppress(InvalidValueError):
                    ends.append(ring.producer())

            assert hammer.together(*[attach] * 4) == []
            assert len(ends) == 1
        assert ends[0].closed


def test_every_end_that_threads_make_is_closed_with_its_ring(hammer: Any) -> None:
    for _ in range(60):
        ring = Ring("u8", 8)
        ends: list[Any] = []

        def make(method: Any, ends: list[Any] = ends) -> None:
            with contextlib.suppress(ClosedError):
                ends.append(method())

        works = [
            lambda ring=ring: make(ring.producer),
            lambda ring=ring: make(ring.consumer),
            ring.close,
        ]
        assert hammer.together(*works) == []
        ring.close()
        assert all(end.closed for end in ends)


def test_an_end_is_closed_while_it_waits(hammer: Any) -> None:
    for _ in range(10):
        with Ring("u8", 8) as ring:
            producer, consumer = ring.producer(), ring.consumer()
            started = threading.Event()

            def wait(consumer: Any = consumer, started: Any = started) -> None:
                started.set()
                with pytest.raises(ClosedError):
                    consumer.recv(timeout_s=20)

            def close(consumer: Any = consumer, started: Any = started) -> None:
                started.wait()
                consumer.close()

            assert hammer.together(wait, close) == []
            producer.close()


# --- kernels -------------------------------------------------------------------------------------


def test_every_call_of_many_threads_gets_its_own_reply(hammer: Any) -> None:
    with native_echo(rings=2) as kernel:
        counts = [0] * 4

        def caller(index: int) -> Any:
            def body(number: int) -> None:
                value = number * 4 + index
                out = np.zeros(1, ECHO) if number % 3 == 0 else None
                reply = kernel.call(message(value), ring=index % 2, out=out)
                assert np.ravel(reply["words"])[0] == value * 3 + 1
                counts[index] += 1

            return body

        assert hammer.repeat(*(caller(index) for index in range(4))) == []
        handled = [kernel.telemetry(ring).processed for ring in range(2)]
        assert handled == [counts[0] + counts[2], counts[1] + counts[3]]
        assert kernel.unread(0) == kernel.unread(1) == 0


def test_dtypes_that_are_equal_but_not_one_object_are_called_with(hammer: Any) -> None:
    def caller(number: int) -> None:
        own = np.dtype([("words", "u8", (7,))])  # equal to ECHO, an object of its own
        one = np.zeros(1, own)
        one["words"] = number
        assert first(kernel.call(one[0])) == number * 3 + 1

    with native_echo() as kernel:
        assert hammer.repeat(caller, caller, caller, caller) == []


def test_a_kernel_is_paused_started_and_ended_while_others_call(hammer: Any) -> None:
    kernel = native_echo().start()

    def call(number: int) -> None:
        with contextlib.suppress(ClosedError):
            assert first(kernel.call(message(number), timeout_s=20)) == number * 3 + 1

    def govern(number: int) -> None:
        kernel.pause()
        kernel.resume()
        assert kernel.state.running
        if number % 4 == 3:
            kernel.terminate()
            kernel.start()

    assert hammer.repeat(call, call, call, govern) == []
    kernel.close()


def test_a_kernel_that_is_closed_meanwhile_lets_all_callers_go(hammer: Any) -> None:
    for _ in range(8):
        kernel = native_echo().start()

        def call(kernel: RingKernel = kernel) -> None:
            with contextlib.suppress(ClosedError):
                for number in range(10_000_000):
                    assert first(kernel.call(message(number))) == number * 3 + 1

        def close(kernel: RingKernel = kernel) -> None:
            for _ in range(200):
                kernel.stalled  # noqa: B018 - what the watchdog says, until there is none
            kernel.close()

        assert hammer.together(call, call, call, close, close) == []


# --- asyncio -------------------------------------------------------------------------------------


def test_a_kernel_has_one_asyncio_side(hammer: Any) -> None:
    for _ in range(30):
        kernel = native_echo()
        found: list[Any] = []
        ask = [lambda k=kernel, f=found: f.append(k.aio)] * 4
        assert hammer.together(*ask) == []
        assert len({id(side) for side in found}) == 1
        kernel.close()


def test_loops_of_several_threads_each_with_a_kernel(hammer: Any) -> None:
    async def main(index: int) -> bool:
        async def one(kernel: Any, number: int) -> bool:
            return all(
                [first(await kernel.call(message(number + i))) == (number + i) * 3 + 1
                 for i in range(20)]
            )  # fmt: skip

        async with native_echo(capacity=16) as kernel:
            return all(await asyncio.gather(*(one(kernel, index * 1000 + n) for n in range(30))))

    right: list[bool] = []
    works = [lambda i=i: right.append(asyncio.run(main(i))) for i in range(4)]
    assert hammer.together(*works) == []
    assert right == [True] * 4


def test_loops_that_share_a_kernel_are_refused_or_right(hammer: Any) -> None:
    answered: list[int] = []
    refused: list[str] = []

    async def main(index: int) -> None:
        for number in range(150):
            value = number * 4 + index
            try:
                replies = await asyncio.gather(*(kernel.aio.call(message(value)) for _ in range(3)))
            except RingmemError as error:
                refused.append(str(error))
                await asyncio.sleep(0)
                continue
            assert [first(reply) for reply in replies] == [value * 3 + 1] * 3
            answered.append(value)

    with native_echo() as kernel:
        works = [lambda i=i: asyncio.run(asyncio.wait_for(main(i), 50)) for i in range(4)]
        assert hammer.together(*works) == []
        assert answered
        assert all("loop" in text for text in refused), set(refused)
        kernel.aio.close()


def test_a_reply_that_other_threads_touch_breaks_nothing(hammer: Any) -> None:
    async def main() -> int:
        mine = 0
        async with native_echo() as kernel:
            for number in range(400):
                reply = kernel.call(message(number))
                replies.append(reply)
                try:
                    assert first(await reply) == number * 3 + 1
                    mine += 1
                except asyncio.CancelledError:
                    pass
            over.set()
            return mine

    def touch() -> None:
        while not over.is_set():
            for reply in replies[-3:]:
                reply.done(), reply.cancelled()
                with contextlib.suppress(asyncio.InvalidStateError, asyncio.CancelledError):
                    reply.result()
                with contextlib.suppress(asyncio.InvalidStateError, asyncio.CancelledError):
                    reply.exception()
                reply.remove_done_callback(touch)

    replies: list[Any] = []
    over = threading.Event()
    results: list[int] = []

    def run() -> None:
        try:
            results.append(asyncio.run(main()))
        finally:
            over.set()

    assert hammer.together(run, touch, touch, touch) == []
    assert results == [400]
