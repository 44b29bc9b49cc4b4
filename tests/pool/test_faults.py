"""Every driver call of every operation fails once: nothing is lost, and the pool goes on."""

import contextlib
import gc
import warnings

import pytest

import ringmem
from ringmem import NativePool, PinnedPool, Pool, UnifiedPool
from ringmem.native import _native

MIB = 1 << 20
CONFIG = "devices=1,capacity=256MiB"


def grow_and_free(device, pool, streams):
    blocks = [pool.allocate(n, s) for n in (300, 5000, 3 * MIB, 40 * MIB) for s in streams]
    for block in blocks:
        block.close()


def cross_streams(device, pool, streams):
    a, b = streams
    block = pool.allocate(6 * MIB, a)
    block.record_stream(b)
    block.close()
    pool.allocate(6 * MIB, b).close(a)


def remap(device, pool, streams):
    blocks = [pool.allocate(2 * MIB, streams[0]) for _ in range(16)]
    del blocks[::2]
    pool.allocate(12 * MIB, streams[1]).close()


def trim(device, pool, streams):
    pool.allocate(30 * MIB, streams[0]).close()
    pool.trim()


def reserve_and_limit(device, pool, streams):
    pool.reserve(20 * MIB)
    pool.limit = 24 * MIB
    pool.limit = "32 MiB"


def typed(device, pool, streams):
    with pool.empty(1000, "f4", streams[0]) as buffer:
        buffer.fill(1, stream=streams[1])


OPERATIONS = [grow_and_free, cross_streams, remap, trim, reserve_and_limit, typed]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_whatever_fails_nothing_is_lost(operation, when):
    """Fail call after call, until none is left to fail."""
    for nth in range(1, 1000):
        driver = _native.FaultyDriver(_native.HostDriver(CONFIG))
        device = ringmem.devices_of(driver)[0]
        streams = [device.create_stream() for _ in range(2)]
        pool = Pool(device, limit="32 MiB" if operation is remap else None)
        before = sum(driver.calls.values())
        driver.fail("*", nth=nth, when=when)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # What fails names itself, and what was freed in vain is freed by its finalizer.
            with contextlib.suppress(ringmem.RingmemError):
                operation(device, pool, streams)
            driver.clear()
        calls = sum(driver.calls.values()) - before
        assert pool.inconsistency() == ""
        # The pool goes on as if nothing had been, and closes.
        pool.limit = None
        pool.allocate(3 * MIB, streams[0]).close()
        assert pool.statistics().live == 0, nth
        pool.close()
        assert pool.reserved == 0
        for stream in streams:
            stream.close()
        del pool, streams, device, stream
        assert settled(driver) == {}, nth
        if nth > calls:
            break
    assert 3 < nth < 999


def host_use(device, make, stream):
    """Grow, order frees after a stream, reuse, typed memory, trim, close."""
    pool = make(device, arena_nbytes="2 MiB")
    blocks = [pool.allocate(nbytes, stream) for nbytes in (100, 5000, MIB, 3 * MIB)]
    blocks[0].record_stream(device.default_stream)
    for block in blocks:
        block.close()
    with pool.empty(1000, "f4", stream):
        pass
    stream.synchronize()
    pool.trim()
    pool.close()


def native_use(device, make, stream):
    """Make, set, look, allocate on two streams, trim, destroy."""
    pool = make(device, max_size="64 MiB", shareable=True)
    pool.release_threshold = "1 MiB"
    block = pool.allocate(MIB, stream)
    block.record_stream(device.default_stream)
    block.close()
    with pool.empty(1000, "f4", stream):
        pool.statistics()
    stream.synchronize()
    pool.reset_peaks()
    pool.trim()
    pool.destroy()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("make", "use"),
    [(PinnedPool, host_use), (UnifiedPool, host_use), (NativePool, native_use)],
)
def test_whatever_fails_in_the_other_pools_nothing_is_lost(make, use, when):
    """The same: what is dropped after a failure goes back, and the device is as it was."""
    for nth in range(1, 1000):
        driver = _native.FaultyDriver(_native.HostDriver(CONFIG))
        device = ringmem.devices_of(driver)[0]
        stream = device.create_stream()
        before = sum(driver.calls.values())
        driver.fail("*", nth=nth, when=when)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(ringmem.RingmemError):
                use(device, make, stream)
            driver.clear()
            calls = sum(driver.calls.values()) - before
            gc.collect()
        use(device, make, stream)
        stream.close()
        del stream, device
        left = settled(driver)
        if when == "before" and left.get("event") == 1:
            del left["event"]  # its destruction was what failed, and nobody waits for that
        assert left == {}, nth
        if nth > calls:
            break
    assert 8 < nth < 999


def settled(driver):
    """What is live once the reaper has done its work."""
    gc.collect(0)
    _native.flush_reaper(10.0)
    return {kind: count for kind, count in driver.live.items() if count}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_close_that_fails_says_so_and_can_be_repeated(when):
    for nth in range(1, 30):
        driver = _native.FaultyDriver(_native.HostDriver(CONFIG))
        device = ringmem.devices_of(driver)[0]
        pool = Pool(device)
        pool.allocate(40 * MIB).close()
        driver.fail("*", nth=nth, when=when)
        try:
            pool.close()
            clean = True
        except ringmem.DriverError:
            clean = False
        driver.clear()
        pool.close()
        assert pool.reserved == 0
        del pool, device
        gc.collect()
        _native.flush_reaper(10.0)
        if when == "before":
            assert {kind: n for kind, n in driver.live.items() if n} == {}, nth
        if clean and nth > 12:
            break


def test_a_pinned_free_that_cannot_be_marked_keeps_the_block(faulty):
    device = ringmem.devices_of(faulty)[0]
    pool = PinnedPool(device, arena_nbytes="2 MiB")
    block = pool.allocate(1000, device.default_stream)
    for operation in ("event_create", "event_record"):
        faulty.fail(operation, nth=1)
        with pytest.raises(ringmem.DriverError):
            block.close()
        assert not block.closed
        assert pool.statistics().live == 1
    block.close()
    device.default_stream.synchronize()
    pool.close()
