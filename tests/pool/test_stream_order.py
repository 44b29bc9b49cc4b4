"""Memory freed on one stream and used on another: never too early, and never lost."""

import threading
import time

import pytest

import ringmem
from ringmem import Pool
from ringmem.native import _native

MIB = 1 << 20
PER_THREAD = 2  # the handle of the per-thread default stream


@pytest.fixture
def driver():
    return _native.FaultyDriver(_native.HostDriver("devices=1,capacity=4GiB"))


@pytest.fixture
def device(driver):
    return ringmem.devices_of(driver)[0]


class Gate:
    """Work on a stream that does not end before the gate is opened."""

    def __init__(self, driver, stream):
        self.opened = threading.Event()
        self.driver = driver
        driver.launch_host_function(0, stream, lambda: self.opened.wait(60))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opened.set()

    def holds(self, stream):
        """Whether `stream` waits for the gate: work given to it now does not run before."""
        ran = threading.Event()
        self.driver.launch_host_function(0, stream.handle, ran.set)
        held = not ran.wait(0.05)
        self.opened.set()
        assert ran.wait(30)
        return held


def streams_beyond_slots(pool, device):
    """Takes all 63 slots of the pool's stream order; returns the streams, which must stay alive."""
    streams = [device.create_stream() for _ in range(63)]
    for stream in streams:
        pool.allocate(MIB, stream).close()
    return streams


# --- the slot that streams share ------------------------------------------------------------------


def use_per_thread_stream_too(pool, stream):
    block = pool.allocate(64 * MIB, stream)
    block.record_stream(PER_THREAD)
    block.close()


def free_on_per_thread_stream(pool, stream):
    pool.allocate(64 * MIB, stream).close(PER_THREAD)


def join_blocks_of_both(pool, stream):
    one, two = pool.allocate(32 * MIB, stream), pool.allocate(32 * MIB, PER_THREAD)
    one.close()
    two.close()
    pool.allocate(64 * MIB, stream).close()


@pytest.mark.parametrize(
    "use", [use_per_thread_stream_too, free_on_per_thread_stream, join_blocks_of_both]
)
def test_what_the_per_thread_stream_used_is_reused_without_waiting_for_the_device(
    driver, device, use
):
    pool = Pool(device)
    stream = device.create_stream()
    for _ in range(200):
        use(pool, stream)
    statistics = pool.statistics()
    assert statistics.reserved <= 128 * MIB
    assert statistics.retries == 0
    pool.close()
    assert driver.calls["synchronize"] == 0


def test_the_streams_that_share_a_slot_hold_no_more_than_the_others(driver, device):
    pool = Pool(device)
    streams = streams_beyond_slots(pool, device)
    late = [device.create_stream() for _ in range(3)]
    for i in range(300):
        first = pool.allocate(32 * MIB, late[i % 3])
        second = pool.allocate(32 * MIB, streams[i % 63])
        first.close()
        second.close()
        pool.allocate(64 * MIB, streams[-1]).close()
    assert pool.statistics().reserved <= 256 * MIB
    assert driver.calls["synchronize"] == 0


@pytest.mark.parametrize("how", ["freed", "recorded", "joined"])
def test_memory_of_a_shared_slot_waits_for_its_stream(driver, device, how):
    pool = Pool(device, limit="64 MiB")
    streams = streams_beyond_slots(pool, device)
    pool.trim()
    busy, other = device.create_stream(), device.create_stream()
    with Gate(driver, busy.handle) as gate:
        if how == "recorded":
            block = pool.allocate(64 * MIB, streams[0])
            block.record_stream(busy)
            block.close()
        elif how == "freed":
            pool.allocate(64 * MIB, busy).close()
        else:
            blocks = [pool.allocate(32 * MIB, stream) for stream in (busy, other)]
            for block in blocks:
                block.close()
        # Later events of the slot, which are done at once, say nothing about the busy stream.
        held = pool.allocate(64 * MIB, streams[1])
        assert gate.holds(streams[1])
    held.close()


def test_memory_whose_event_was_lost_is_not_taken_for_done_by_later_events(driver, device):
    pool = Pool(device)
    streams = streams_beyond_slots(pool, device)
    pool.trim()
    busy, other = device.create_stream(), device.create_stream()
    lost, later = pool.allocate(48 * MIB, busy), pool.allocate(16 * MIB, other)
    ptr = lost.ptr
    with Gate(driver, busy.handle):
        driver.fail("event_record", nth=1, status=_native.Status.invalid_handle)
        lost.close()
        driver.clear()
        later.close()
        other.synchronize()
        pool.trim(1 << 30)  # looks which events are done
        held = [pool.allocate(48 * MIB, stream) for stream in (streams[0], other, streams[1])]
        assert all(not block.ptr < ptr + 48 * MIB or block.ptr + 48 * MIB <= ptr for block in held)
    device.synchronize()
    del held
    pool.close()
    assert driver.live["physical"] == 0


def test_a_stream_in_the_slot_of_a_released_one_waits_for_its_small_blocks(driver, device):
    pool = Pool(device)
    streams = [device.create_stream() for _ in range(63)]
    blocks = [pool.allocate(1000, stream) for stream in streams]
    ptr = blocks[5].ptr
    with Gate(driver, streams[5].handle) as gate:
        blocks[5].close()
        streams[5].close()
        following = device.create_stream()
        block = pool.allocate(1000, following)
        assert block.ptr != ptr or gate.holds(following)


# --- small blocks that other streams used -----------------------------------------------------------


def small_blocks(pool, stream, other, *, recorded=False):
    """40 MiB of small blocks of `stream`, freed with `other` in it."""
    blocks = [pool.allocate(32768, stream) for _ in range(1280)]
    for block in blocks:
        if recorded:
            block.record_stream(other)
        block.close(stream if recorded else other)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_trim_gives_small_blocks_that_another_stream_used_back(driver, device, recorded, busy):
    pool = Pool(device)
    stream, other = device.create_stream(), device.create_stream()
    with Gate(driver, other.handle) as gate:
        if not busy:
            gate.opened.set()
        small_blocks(pool, stream, other, recorded=recorded)
        pool.trim()
        assert pool.reserved == 0
    pool.close()
    assert driver.live["physical"] == driver.live["mapping"] == 0


def test_a_limit_and_a_threshold_see_small_blocks_that_another_stream_used(device):
    pool = Pool(device)
    stream, other = device.create_stream(), device.create_stream()
    small_blocks(pool, stream, other)
    pool.limit = 8 * MIB
    assert pool.reserved <= 8 * MIB
    pool.limit = None
    pool.release_threshold = 0
    small_blocks(pool, stream, other)
    assert pool.reserved == 0


def test_small_blocks_that_another_stream_used_become_large_ones_in_order(driver, device):
    pool = Pool(device, limit="64 MiB")
    stream, other, third = (device.create_stream() for _ in range(3))
    with Gate(driver, other.handle) as gate:
        small_blocks(pool, stream, other)
        block = pool.allocate(60 * MIB, third)
        assert pool.statistics().retries == 0
        assert gate.holds(third)
    block.close()


def test_only_the_last_small_block_of_a_span_gives_its_memory_back(driver, device):
    pool = Pool(device, limit="4 MiB")
    stream, other = device.create_stream(), device.create_stream()
    blocks = [pool.allocate(32768, stream) for _ in range(128)]
    kept = blocks[::16]
    for block in blocks:
        if block not in kept:
            block.close(other)
    pool.trim()
    live = sorted((block.ptr, block.ptr + block.nbytes) for block in kept)
    with pytest.raises(ringmem.OutOfMemoryError):
        pool.allocate(4 * MIB, other)
    again = [pool.allocate(32768, stream) for _ in range(120)]  # all of them have come back
    for block in again:
        assert all(block.ptr + 32768 <= start or end <= block.ptr for start, end in live)
    for block in (*kept, *again):
        block.close(stream)  # their own stream is the last one
    pool.trim()
    assert pool.reserved == 0


def test_a_pool_closed_when_unused_gives_small_blocks_of_other_streams_back(device):
    pool = Pool(device)
    stream, other = device.create_stream(), device.create_stream()
    blocks = [pool.allocate(32768, stream) for _ in range(64)]
    pool.close(when_unused=True)
    for block in blocks:
        block.close(other)
    assert pool.reserved == 0


def test_pending_blocks_of_another_size_cost_an_allocation_nothing(device):
    def spent_s(pool, stream):
        start = time.perf_counter()
        blocks = [pool.allocate(2000, stream) for _ in range(5000)]
        spent = time.perf_counter() - start
        for block in blocks:
            block.close()
        return spent

    stream, other = device.create_stream(), device.create_stream()
    pool = Pool(device)
    alone = spent_s(pool, stream)
    for block in [pool.allocate(1000, stream) for _ in range(200_000)]:
        block.close(other)
    other_class = [pool.allocate(2000, stream) for _ in range(5000)]
    # A list that is read anew for every span takes 50 times as long.
    assert spent_s(pool, stream) < 10 * alone + 0.02
    assert len(other_class) == 5000
