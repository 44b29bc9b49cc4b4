"""asyncio beside others: several rings, other threads, a cancelled reader, an end, a closed loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import handlers_for_tests as h
import pytest
from handlers_for_tests import first, message, native_echo

import ringmem
from ringmem.ring import RingKernel, poll_interval_us, set_poll_interval_us


def tenths(**arguments: object) -> RingKernel:
    return RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu", **arguments)


def test_a_call_on_a_second_ring_does_not_wait_for_the_first() -> None:
    async def main() -> float:
        with tenths(rings=2) as kernel:
            began = time.monotonic()
            slow = kernel.aio.call((0, 8), ring=0)
            await kernel.aio.call((0, 0), ring=1)
            took = time.monotonic() - began
            await slow
            return took

    assert asyncio.run(main()) < 0.6


def test_room_on_a_second_ring_is_seen_while_the_first_is_waited_for() -> None:
    async def main() -> float:
        with tenths(rings=2, capacity=1) as kernel:
            began = time.monotonic()
            slow = kernel.aio.call((0, 8), ring=0)
            await asyncio.gather(*(kernel.aio.call((0, 0), ring=1) for _ in range(5)))
            took = time.monotonic() - began
            await slow
            return took

    assert asyncio.run(main()) < 0.6


@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize("how", ["recv", "call"])
def test_a_thread_on_one_ring_leaves_awaited_calls_on_another_alone(busy: int, how: str) -> None:
    async def main() -> list[int]:
        with tenths(rings=2) as kernel:

            def use() -> None:
                if how == "call":
                    kernel.call((0, 5), 10, ring=busy)
                else:
                    with pytest.raises(ringmem.TimeoutError):
                        kernel.recv(timeout_s=0.5, ring=busy)

            thread = threading.Thread(target=use)
            thread.start()
            await asyncio.sleep(0.1)
            replies = [await kernel.aio.call((0, 0), ring=1 - busy) for _ in range(3)]
            assert thread.is_alive()
            await asyncio.to_thread(thread.join)
            return [int(reply["b"]) for reply in replies]

    assert asyncio.run(main()) == [0, 0, 0]


@pytest.mark.parametrize("turns", range(6))
def test_a_cancelled_reader_ends(turns: int) -> None:
    async def reader(kernel: RingKernel) -> None:
        async for _ in kernel.aio:
            pass

    async def main() -> None:
        with native_echo() as kernel:
            task = asyncio.create_task(reader(kernel))
            await asyncio.sleep(0.03)
            kernel.send(message(1))
            time.sleep(0.02)  # the reply is there before the loop looks
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=5)
            assert task.cancelled()

    asyncio.run(main())


def test_a_loop_that_is_late_at_the_end_reads_every_reply() -> None:
    async def reader(kernel: RingKernel) -> int:
        return sum([len(batch) async for batch in kernel.aio])

    async def main() -> int:
        with native_echo() as kernel:
            task = asyncio.create_task(reader(kernel))
            await asyncio.sleep(0.03)
            kernel.pause()
            kernel.send([message(i) for i in range(10)])
            kernel.resume()
            kernel.drain(10)
            time.sleep(0.3)  # timer and replies are due in one turn
            return await asyncio.wait_for(task, 10)

    assert asyncio.run(main()) == 10


def test_reading_a_kernel_that_never_ran_says_so() -> None:
    async def main() -> None:
        async for _ in native_echo().aio:
            pass

    with pytest.raises(ringmem.ClosedError, match=r"new; start\(\) it first"):
        asyncio.run(main())


def test_a_kernel_that_drains_takes_no_awaited_calls() -> None:
    async def main() -> int:
        kernel = tenths(capacity=64).start()
        replies = [kernel.aio.call((0, 1)) for _ in range(5)]
        draining = asyncio.create_task(asyncio.to_thread(kernel.drain, 10))
        await asyncio.sleep(0.1)
        with pytest.raises(ringmem.ClosedError, match="told to end|terminated"):
            kernel.aio.call((0, 1))
        await asyncio.gather(*replies)
        await draining
        handled = kernel.telemetry().processed
        kernel.aio.close()
        kernel.close()
        return handled

    assert asyncio.run(main()) == 5


@pytest.fixture
def rare_looks() -> Iterator[None]:
    before = poll_interval_us()
    set_poll_interval_us(1_000_000)
    yield
    set_poll_interval_us(before)


@pytest.mark.parametrize("end", ["drain", "close"])
@pytest.mark.usefixtures("rare_looks")
def test_replies_that_came_before_the_end_are_not_given_up(end: str) -> None:
    async def main() -> list[int]:
        kernel = native_echo(capacity=8).start()
        await kernel.aio.call(message(0))  # the poller has looked, and looks away
        replies = [kernel.aio.call(message(i)) for i in range(8)]
        h.until(lambda: kernel.telemetry().processed == 9)
        if end == "drain":
            await asyncio.to_thread(kernel.drain, 10)
        else:
            kernel.aio.close()
        found = await asyncio.gather(*replies)
        kernel.aio.close()
        kernel.close()
        return [first(reply) for reply in found]

    assert asyncio.run(main()) == [i * 3 + 1 for i in range(8)]


def test_calls_that_wait_for_room_are_not_sent_to_a_kernel_that_ends() -> None:
    async def main() -> None:
        kernel = tenths(capacity=1).start()
        replies = [kernel.aio.call((0, 3)) for _ in range(4)]
        await asyncio.to_thread(kernel.terminate)
        found = await asyncio.gather(*replies, return_exceptions=True)
        assert {type(one) for one in found[2:]} == {ringmem.ClosedError}
        handled = kernel.telemetry().processed
        kernel.start()
        await asyncio.sleep(0.5)
        assert handled + kernel.telemetry().processed <= 2  # one in work, one in the ring
        kernel.aio.close()
        kernel.close()

    asyncio.run(main())


def test_calls_that_are_given_up_before_they_were_sent_are_never_sent() -> None:
    async def main() -> int:
        with native_echo(capacity=2) as kernel:
            kernel.pause()
            replies = [kernel.aio.call(message(i)) for i in range(6)]
            kernel.resume()
            h.until(lambda: kernel.telemetry().processed == 2)
            kernel.aio.close()  # there is room for more by now
            found = await asyncio.gather(*replies, return_exceptions=True)
            assert [first(reply) for reply in found[:2]] == [1, 4]
            assert {type(one) for one in found[2:]} == {ringmem.ClosedError}
            assert first(kernel.call(message(7), 5)) == 22
            return kernel.telemetry().processed

    assert asyncio.run(main()) == 3


USES: dict[str, Callable[[RingKernel], int]] = {
    "call": lambda kernel: first(kernel.call(message(7), 5)),
    "recv": lambda kernel: kernel.send(message(7)) and first(kernel.recv(timeout_s=5)[0]),
    "full ring": lambda kernel: [kernel.send(message(7), 5) for _ in range(3)] and 22,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_calls_of_a_loop_that_was_closed_are_given_up(use: Callable[[RingKernel], int]) -> None:
    async def leave(kernel: RingKernel) -> None:
        for _ in range(3):  # one more than there is room for
            kernel.aio.call(message(100))

    with native_echo(capacity=2) as kernel:
        kernel.pause()
        asyncio.run(leave(kernel))
        assert kernel.aio.pending == 3
        threading.Timer(0.1, kernel.resume).start()
        assert use(kernel) == 22
        assert kernel.aio.pending == 0
