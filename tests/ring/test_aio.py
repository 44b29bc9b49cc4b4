"""Ring kernels under asyncio: replies find their tasks; nothing waits for a kernel that ended."""

from __future__ import annotations

import asyncio
import threading
import time

import handlers_for_tests as h
import numpy as np
import pytest
from handlers_for_tests import ECHO, first, message, native_echo

from ringmem import (
    ClosedError,
    HandlerError,
    InvalidValueError,
    KernelFailedError,
    RingmemError,
)
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
            for use in (lambda: kernel.call(message(0)), lambda: kernel.recv(timeout_s=0)):
                with pytest.raises(
                    InvalidValueError, match=r"event loop .* kernel\.aio\.close\(\)"
                ):
                    use()
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


def test_nothing_goes_ahead_of_calls_that_wait_for_room() -> None:
    async def main() -> list[int]:
        async with native_echo(capacity=8) as calls:
            kernel = calls.kernel
            kernel.pause()
            replies = [calls.call(message(i)) for i in range(20)]  # 12 find the ring full
            kernel.resume()
            time.sleep(0.05)  # the kernel has answered: there is room, but not for others
            with pytest.raises(InvalidValueError, match="12 awaited calls .* wait for room"):
                kernel.send(np.zeros(2, ECHO))
            with pytest.raises(InvalidValueError, match="wait for room"):
                kernel.reserve(1)
            with pytest.raises(InvalidValueError, match="wait for room"):
                kernel.call(message(0))
            found = [first(reply) for reply in await asyncio.gather(*replies)]
            assert kernel.send(np.zeros(2, ECHO)) == 2
            assert kernel.recv(2, timeout_s=5)["words"][0][0] == 1
            return found

    assert asyncio.run(main()) == [i * 3 + 1 for i in range(20)]


def test_closing_lets_others_send_again_where_calls_waited_for_room() -> None:
    async def main() -> None:
        with native_echo(capacity=2) as kernel:
            kernel.pause()
            replies = [kernel.aio.call(message(i)) for i in range(5)]
            kernel.aio.close()
            found = await asyncio.gather(*replies, return_exceptions=True)
            assert [type(one) for one in found] == [ClosedError] * 5
            kernel.resume()
            assert first(kernel.call(message(3), timeout_s=5)) == 10

    asyncio.run(main())


@pytest.mark.parametrize("read", ["recv", "recv_into"])
def test_a_call_does_not_lose_its_reply_to_a_thread_that_reads(read: str) -> None:
    async def main() -> None:
        with native_echo() as kernel:
            arguments = () if read == "recv" else (np.zeros(1, ECHO),)
            ended: list[object] = []

            def reader() -> None:
                try:
                    getattr(kernel, read)(*arguments, timeout_s=0.5)
                except TimeoutError as error:
                    ended.append(error)

            thread = threading.Thread(target=reader)
            thread.start()
            await asyncio.sleep(0.1)
            with pytest.raises(RingmemError, match="another thread reads replies of this ring"):
                kernel.aio.call(message(42))
            assert kernel.aio.pending == 0
            thread.join()
            assert len(ended) == 1
            assert first(await asyncio.wait_for(kernel.aio.call(message(43)), 5)) == 130

    asyncio.run(main())


def test_task_groups_and_tasks_take_replies() -> None:
    async def main() -> list[int]:
        async with native_echo(capacity=8) as kernel:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(kernel.call(message(i))) for i in range(20)]
            kernel.kernel.pause()
            late = asyncio.create_task(kernel.call(message(1)))
            gone = asyncio.create_task(kernel.call(message(2)))
            done, left = await asyncio.wait([late, gone], timeout=0.02)
            assert (done, left) == (set(), {late, gone})
            gone.cancel()
            kernel.kernel.resume()
            done, left = await asyncio.wait([late, gone], timeout=10)
            assert (done, left) == ({late, gone}, set())
            assert gone.cancelled()
            assert first(late.result()) == 4
            assert first(await kernel.call(message(3))) == 10
            return [first(task.result()) for task in tasks]

    assert asyncio.run(main()) == [i * 3 + 1 for i in range(20)]


def test_a_reader_that_gives_up_before_the_first_batch_takes_nothing() -> None:
    async def main() -> None:
        async with native_echo() as calls:
            kernel = calls.kernel
            kernel.pause()
            kernel.send(np.zeros(1, ECHO))
            await asyncio.gather(calls._readable(0), _resume(kernel))
            kernel.release()  # nobody polled
            assert len(kernel.recv(timeout_s=5)) == 1

    asyncio.run(main())


async def _resume(kernel: RingKernel) -> None:
    kernel.resume()
