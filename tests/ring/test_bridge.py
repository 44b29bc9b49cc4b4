"""Bridges: all transfer strategies give the same answers, and refuse what they cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringmem
from ringmem import Async, DmaPolling, Mapped, RingBufferBridge, Sync, Unified
from ringmem.device import Device, MemoryVisibility
from ringmem.device.platform_facts import PlatformKind
from ringmem.device.visibility import VisibilityDecision
from ringmem.native import _native
from ringmem.native.errors import (
    ClosedError,
    CorruptedError,
    DriverError,
    InvalidValueError,
    NotSupportedError,
    TimeoutError,  # noqa: A004
)
from ringmem.ring.bridge_memory import HEAD, TAIL
from ringmem.ring.slots import Slots, host_bytes
from ringmem.ring.strategies import refusal

STRATEGIES = [Mapped(), Unified(), Sync(), Async(), DmaPolling(interval_us=50)]
MESSAGE = np.dtype([("number", "i8"), ("values", "f4", (3,))])
LARGE = np.dtype([("number", "i8"), ("rest", "u1", (48,)), ("more", "i8", (7,))])


class DeviceSide:
    """What device code does, in NumPy: a CPU device's memory is the host's."""

    def __init__(self, bridge):
        self.bridge = bridge
        self.input, self.output = bridge.device_input, bridge.device_output
        self.requests, self.answers = (
            Slots(
                host_bytes(ring.slots_ptr - 384, 384 + ring.capacity * ring.slot_nbytes, bridge),
                bridge.message,
                ring.capacity,
            )
            for ring in (self.input, self.output)
        )
        self.head = self.tail = 0

    def answer(self, limit):
        """Take up to `limit` messages and answer those; how many."""
        self.bridge._stream.synchronize()
        waiting = _native.load_u64(self.input.header_ptr + TAIL) - self.head
        free = self.output.capacity - (self.tail - _native.load_u64(self.output.header_ptr + HEAD))
        count = min(limit, waiting, free)
        for _ in range(count):
            slot, lap = self.head % self.input.capacity, self.head // self.input.capacity
            request = self.requests.messages[slot]
            answer = self.answers.messages[slot]
            for name in self.bridge.message.names:
                answer[name] = request[name]
            answer["number"] = request["number"] * 3 + 1
            for line in range(self.output.slot_nbytes // 64):
                _native.store_u64(
                    self.output.slots_ptr + slot * self.output.slot_nbytes + line * 64, lap + 1
                )
            self.head += 1
            self.tail += 1
        _native.store_u64(self.input.header_ptr + HEAD, self.head)
        _native.store_u64(self.output.header_ptr + TAIL, self.tail)
        return count


def transcript(strategy, capacity, steps, message=MESSAGE):
    """What a host sees of a sequence of (send, answer, receive) steps."""
    said, number = [], 0
    with RingBufferBridge(message, capacity, "cpu", strategy=strategy) as bridge:
        device = DeviceSide(bridge)
        for send, answer, receive in steps:
            batch = np.zeros(send, message)
            batch["number"] = np.arange(number, number + send)
            accepted = bridge.send(batch)
            number += accepted
            bridge.flush_to_device()
            answered = device.answer(answer)
            bridge.flush_to_host()
            assert len(bridge.recv(0, timeout_s=0.05)) == 0  # whatever waits
            got = bridge.recv(receive)
            said.append((accepted, answered, got["number"].tolist()))
        counters = dataclasses.astuple(bridge.counters)
        said.append((counters[0], counters[1], counters[4], counters[5]))
        if strategy.copies:
            assert bridge.counters.moved_to_device == bridge.counters.sent
            assert bridge.counters.moved_to_host == bridge.counters.written_by_device
        else:
            assert (counters[2], counters[3]) == (0, 0)
        del device
    return said


step = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([1, 2, 8]), st.lists(step, max_size=8))
def test_all_strategies_give_the_same_answers(capacity, steps):
    wanted = transcript(Mapped(), capacity, steps)
    received = [number for _, _, numbers in wanted[:-1] for number in numbers]
    assert received == [3 * i + 1 for i in range(len(received))]
    for strategy in STRATEGIES[1:]:
        assert transcript(strategy, capacity, steps) == wanted, strategy


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_messages_of_several_lines_cross_whole_and_wrap(strategy):
    steps = [(6, 6, 6)] * 10
    said = transcript(strategy, 8, steps, LARGE)
    received = [number for _, _, numbers in said[:-1] for number in numbers]
    assert received == [3 * i + 1 for i in range(60)]


@pytest.mark.parametrize("strategy", [Sync(), Async()], ids=str)
def test_without_mapped_memory_the_counters_are_copied_too(strategy, monkeypatch):
    steps = [(5, 3, 2), (8, 9, 8), (0, 8, 8), (4, 4, 9)]
    wanted = transcript(Mapped(), 8, steps)
    decided = decision(MemoryVisibility.EXPLICIT_DMA)
    monkeypatch.setattr(Device, "memory_visibility", lambda self: decided)
    assert transcript(strategy, 8, steps) == wanted


def test_what_was_not_flushed_has_not_arrived():
    with RingBufferBridge("i8", 8, "cpu", strategy=Sync()) as bridge:
        assert bridge.send([1, 2]) == 2
        assert _native.load_u64(bridge.device_input.header_ptr + TAIL) == 0
        assert bridge.flush_to_device() == 2
        assert bridge.flush_to_device() == 0
        assert _native.load_u64(bridge.device_input.header_ptr + TAIL) == 2
        with pytest.raises(TimeoutError):
            bridge.recv(timeout_s=0.01)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_none_at_most_are_none_at_once(strategy):
    with RingBufferBridge(MESSAGE, 8, "cpu", strategy=strategy) as bridge:
        assert bridge.recv(max=0, timeout_s=None).tolist() == []
        assert bridge.recv(max=0).dtype == MESSAGE
        for bad in (-1, 2.5, "x"):
            with pytest.raises(InvalidValueError, match="max="):
                bridge.recv(max=bad)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("timeout_s", [float("nan"), -1, "x", True])
def test_a_timeout_that_is_no_time_is_refused(strategy, timeout_s):
    with RingBufferBridge(MESSAGE, 8, "cpu", strategy=strategy) as bridge:
        with pytest.raises(InvalidValueError, match=f"timeout_s={timeout_s!r} must be seconds"):
            bridge.recv(timeout_s=timeout_s)
        assert len(bridge.recv()) == 0


def test_an_async_flush_does_not_wait_and_keeps_the_streams_order():
    with ringmem.simulate(latency_s=0.1) as simulation:
        device = simulation.devices[0]
        stream = device.create_stream()
        with RingBufferBridge("i8", 8, device, strategy=Async(stream)) as bridge:
            bridge.send([1, 2, 3])
            start = time.monotonic()
            assert bridge.flush_to_device() == 3
            assert time.monotonic() - start < 0.08
            header = bridge.device_input.header_ptr
            assert _native.load_u64(header + TAIL) == 0
            stream.synchronize()
            assert _native.load_u64(header + TAIL) == 3
        stream.close()


def test_polling_needs_no_flush():
    with RingBufferBridge(MESSAGE, 8, "cpu", strategy=DmaPolling(interval_us=50)) as bridge:
        device = DeviceSide(bridge)
        bridge.send(np.ones(3, MESSAGE))
        limit = time.monotonic() + 5
        while device.answer(8) == 0:
            assert time.monotonic() < limit
        assert bridge.recv(1, timeout_s=5)["number"].tolist() == [4]
        del device


def test_what_ended_the_polling_thread_is_raised_by_every_call():
    driver = _native.FaultyDriver(_native.HostDriver())
    device = ringmem.devices_of(driver)[0]
    with RingBufferBridge("i8", 8, device, strategy=DmaPolling(interval_us=50)) as bridge:
        driver.fail("copy_async")
        bridge.send([1])
        deadline = time.monotonic() + 5
        with pytest.raises(DriverError):
            while time.monotonic() < deadline:
                bridge.recv()
        driver.clear()  # the thread is gone, so the bridge does not come back
        for use in (bridge.flush_to_device, bridge.flush_to_host, lambda: bridge.send([2])):
            with pytest.raises(DriverError, match="cuMemcpyAsync"):
                use()


def test_a_flush_counts_once_what_it_moves_however_many_threads_flush():
    with RingBufferBridge("i8", 1024, "cpu", strategy=Sync()) as bridge:
        bridge.send(np.arange(1024))
        with ThreadPoolExecutor(4) as threads:
            moved = list(threads.map(lambda _: bridge.flush_to_device(), range(32)))
        assert sum(moved) == 1024


def test_flushes_can_be_awaited():
    async def both(bridge, device):
        moved = await bridge.flush_to_device_async()
        device.answer(8)
        return moved, await bridge.flush_to_host_async()

    with RingBufferBridge(MESSAGE, 8, "cpu", strategy=Sync()) as bridge:
        bridge.send(np.zeros(3, MESSAGE))
        device = DeviceSide(bridge)
        assert asyncio.run(both(bridge, device)) == (3, 3)
        del device


# --- bad input -----------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", [Sync(), DmaPolling()], ids=str)
@pytest.mark.parametrize(("end", "offset"), [("device_input", HEAD), ("device_output", TAIL)])
def test_an_impossible_index_of_the_device_is_an_error(strategy, end, offset):
    with RingBufferBridge("i8", 8, "cpu", strategy=strategy) as bridge:
        bridge.send([1])
        bridge.flush_to_device()
        _native.store_u64(getattr(bridge, end).header_ptr + offset, 1 << 60)
        with pytest.raises(CorruptedError, match="the device says"):
            for _ in range(3):
                bridge.flush_to_host()
                bridge.send([1])


def decision(visibility, managed=False):
    return VisibilityDecision(
        visibility=visibility,
        managed_concurrent=managed,
        system_atomics=False,
        platform=PlatformKind.WSL2,
        reasons=("for the test",),
    )


@pytest.mark.parametrize(
    ("visibility", "managed", "offered"),
    [
        (MemoryVisibility.SYSTEM_SCOPE, True, {Mapped, Unified, Sync, Async, DmaPolling}),
        (MemoryVisibility.SYSTEM_SCOPE, False, {Mapped, Sync, Async, DmaPolling}),
        (MemoryVisibility.DEVICE_SCOPE, False, {Sync, Async}),
        (MemoryVisibility.EXPLICIT_DMA, False, {Sync, Async}),
    ],
)
def test_visibility_decides_what_is_offered_and_the_refusals_say_what_to_use(
    visibility, managed, offered
):
    decided = decision(visibility, managed)
    for strategy in STRATEGIES:
        why = refusal(strategy, decided)
        assert (why is None) == (type(strategy) in offered)
        assert why is None or "use " in why


def test_the_default_is_mapped_or_sync(monkeypatch):
    with RingBufferBridge("i8", 8, "cpu") as bridge:
        assert bridge.strategy == Mapped()
    decided = decision(MemoryVisibility.DEVICE_SCOPE)
    monkeypatch.setattr(Device, "memory_visibility", lambda self: decided)
    with RingBufferBridge("i8", 8, "cpu") as bridge:
        assert bridge.strategy == Sync()
    with pytest.raises(NotSupportedError, match=r"use Sync\(\)"):
        RingBufferBridge("i8", 8, "cpu", strategy=Mapped())


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("i8", 7), {}, "power of two"),
        (("O", 8), {}, "objects"),
        (("i8", 8), {"strategy": "fast"}, "must be one of"),
    ],
)
def test_wrong_arguments_are_refused(arguments, options, said):
    with pytest.raises(InvalidValueError, match=said):
        RingBufferBridge(*arguments, "cpu", **options)
    with pytest.raises(InvalidValueError, match="interval_us"):
        DmaPolling(interval_us=0)
    with pytest.raises(InvalidValueError, match="interval_us='x' must be microseconds"):
        DmaPolling("x")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_closed_bridge_says_so(strategy):
    bridge = RingBufferBridge("i8", 8, "cpu", strategy=strategy)
    bridge.close()
    bridge.close()
    for use in (bridge.flush_to_device, bridge.flush_to_host, bridge.recv, lambda: bridge.send(1)):
        with pytest.raises(ClosedError):
            use()


def test_a_failed_copy_is_raised_and_nothing_counts_as_moved():
    driver = _native.FaultyDriver(_native.HostDriver())
    device = ringmem.devices_of(driver)[0]
    with RingBufferBridge("i8", 8, device, strategy=Sync()) as bridge:
        bridge.send([1, 2])
        driver.fail("copy_async")
        with pytest.raises(DriverError):
            bridge.flush_to_device()
        assert bridge.counters.moved_to_device == 0
        assert bridge.flush_to_device() == 2


@pytest.mark.parametrize("nth", range(1, 30))
def test_a_bridge_that_cannot_be_made_leaves_nothing(nth):
    driver = _native.FaultyDriver(_native.HostDriver())
    device = ringmem.devices_of(driver)[0]
    for operation in ("host_alloc", "stream_create", "copy_async", "stream_synchronize"):
        driver.fail(operation, nth=nth)
        with contextlib.suppress(DriverError):
            RingBufferBridge("i8", 8, device, strategy=Sync()).close()
        driver.clear()
    assert driver.live["stream"] == 0
