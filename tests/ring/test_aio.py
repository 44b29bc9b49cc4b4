"""Ring kernels under asyncio: replies find their tasks; nothing waits for a kernel that ended."""

from __future__ import annotations

import asyncio
import threading

import handlers_for_tests as h
import numpy as np
import pytest
from handlers_for_tests import ECHO, first, message, native_echo

from ringmem import ClosedError, HandlerError, InvalidValueError, KernelFailedError
from ringmem.ring import RingKernel


def test_await_kernel_call() -> None:
    async def main() -> list[int]:
        async with native_echo() as kernel:
            return [first(await kernel.call(message(i))) for i in range(20)]

    assert asyncio.run(main()) == [i * 3 + 1 for i in range(20)]


def test_a_cancelled_reply_ends_its_gather() -> None:
    async def main() -> list[object]:
        async with native_echo() as kernel:
            replies = [kernel.call(message(i)) for i in range(3)]
            replies[1].cancel()
            found = await asyncio.wait_for(asyncio.gather(*replies, return_exceptions=True), 10)
            return [found[0] if isinstance(found[0], Exception) else first(found[0]), *found[1:]]

    found = asyncio.run(main())
    assert found[0] == 1
    assert isinstance(found[1], asyncio.CancelledError)
    assert first(found[2]) == 7


def test_a_thousand_tasks_get_their_own_replies() -> None:
    async def one(kernel: object, number: int) -> bool:
        for i in range(10):
            value = number * 10 + i
            if first(await kernel.call(message(value))) != value * 3 + 1:
                return False
        return True

    async def main() -> list[bool]:
        async with native_echo(capacity=256) as kernel:  # more waiters than slots
            return await asyncio.gather(*(one(kernel, n) for n in range(1000)))

    assert all(asyncio.run(main()))


@pytest.mark.parametrize("capacity", [1, 2])
def test_small_rings_serve_more_tasks_than_they_have_slots(capacity: int) -> None:
    async def main() -> list[int]:
        async with native_echo(capacity=capacity) as kernel:
            return [
                first(r)
                for r in await asyncio.gather(*(kernel.call(message(i)) for i in range(50)))
            ]

    assert asyncio.run(main()) == [i * 3 + 1 for i in range(50)]


def test_gather_and_wait_for_take_replies_as_futures() -> None:
    async def main() -> list[int]:
        async with native_echo() as kernel:
            replies = await asyncio.gather(*(kernel.call(message(i)) for i in range(5)))
            late = await asyncio.wait_for(kernel.call(message(9)), 5)
            return [*map(first, replies), first(late)]

    assert asyncio.run(main()) == [1, 4, 7, 10, 13, 28]


def test_rings_are_served_together() -> None:
    async def main() -> list[int]:
        async with native_echo(rings=3) as kernel:
            replies = [kernel.call(message(ring), ring=ring) for ring in range(3) for _ in range(5)]
            with pytest.raises(InvalidValueError):
                kernel.call(message(0), ring=3)
            return [first(await reply) for reply in replies]

    assert asyncio.run(main()) == [1] * 5 + [4] * 5 + [7] * 5


def test_cancelled_call_leaves_its_neighbours_alone() -> None:
    async def main() -> list[int]:
        async with native_echo() as kernel:
            kernel.kernel.pause()
            tasks = [asyncio.ensure_future(_value(kernel, i)) for i in range(4)]
            await asyncio.sleep(0.01)
            tasks[1].cancel()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_value(kernel, 7), 0.05)
            kernel.kernel.resume()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(done[1], asyncio.CancelledError)
            return [done[0], done[2], done[3], await _value(kernel, 5)]

    assert asyncio.run(main()) == [1, 7, 10, 16]


async def _value(kernel: object, number: int) -> int:
    return first(await kernel.call(message(number)))


def test_status_of_the_handler_is_raised_where_it_is_awaited() -> None:
    async def main() -> int:
        kernel = RingKernel(h.count, message=h.PAIR, reply=h.TOTAL, state=h.COUNTER, device="cpu")
        async with kernel as calls:
            reply = calls.call((-1, 0))
            with pytest.raises(HandlerError, match="7"):
                await reply
            return int((await calls.call((4, 0)))["total"])

    assert asyncio.run(main()) == 4


def test_kernel_that_ends_itself_fails_everybody_who_waits() -> None:
    async def main() -> None:
        async with native_echo(deadline_s=0.2) as kernel:
            kernel.kernel.pause()
            waiting = [asyncio.ensure_future(_value(kernel, i)) for i in range(3)]
            done = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
            assert [type(one) for one in done] == [KernelFailedError] * 3
            with pytest.raises(KernelFailedError):
                await kernel.call(message(0))

    asyncio.run(main())


def test_closing_fails_everybody_who_waits() -> None:
    async def main() -> None:
        async with native_echo() as kernel:
            kernel.kernel.pause()
            waiting = asyncio.ensure_future(_value(kernel, 1))
            await asyncio.sleep(0)
        with pytest.raises(ClosedError):
            await waiting

    asyncio.run(main())


def test_next_loop_is_served_after_the_first_has_ended() -> None:
    with native_echo() as kernel:

        async def main() -> int:
            return first(await kernel.aio.call(message(3)))

        assert [asyncio.run(main()) for _ in range(3)] == [10] * 3
        assert kernel.call(message(1))["words"][0] == 4


def test_replies_that_a_loop_waits_for_are_not_read_by_others() -> None:
    async def main() -> None:
        async with native_echo() as calls:
            kernel = calls.kernel
            kernel.pause()
            waiting = asyncio.ensure_future(_value(calls, 2))
            await asyncio.sleep(0)
            with pytest.raises(InvalidValueError, match="unread"):
                kernel.call(message(0))
            with pytest.raises(InvalidValueError, match="event loop"):
                kernel.recv(timeout_s=0)
            kernel.resume()
            assert await waiting == 7

    asyncio.run(main())


def test_async_for_yields_every_batch_until_the_kernel_was_drained() -> None:
    async def main() -> np.ndarray:
        got = []
        async with native_echo(capacity=64) as calls:
            kernel = calls.kernel

            def feed() -> None:
                batch = np.zeros(500, ECHO)
                batch["words"] = np.arange(500)[:, None]
                kernel.send(batch)
                kernel.drain(20)

            feeder = threading.Thread(target=feed)
            feeder.start()
            async for batch in calls:
                got.append(batch["words"][:, 0])
            feeder.join()
        return np.concatenate(got)

    assert asyncio.run(main()).tolist() == [i * 3 + 1 for i in range(500)]


def test_loop_goes_on_while_calls_wait() -> None:
    async def main() -> int:
        turns = 0
        async with native_echo() as kernel:
            kernel.kernel.pause()
            waiting = asyncio.ensure_future(_value(kernel, 1))
            for _ in range(50):
                await asyncio.sleep(0.001)
                turns += 1
            kernel.kernel.resume()
            assert await waiting == 4
        return turns

    assert asyncio.run(main()) == 50
