"""A slow device: nothing waits that need not, nothing is reused too early."""

import time

import numpy as np
import pytest

import ringmem
from ringmem.native import _native

LATENCY_S = 0.05


def elapsed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_a_copy_between_buffers_returns_before_it_is_done(slow):
    stream = slow.create_stream()
    pinned = ringmem.PinnedBuffer(1000, "i4", device=slow)
    window = pinned.numpy()
    window[:] = 1
    buffer = ringmem.zeros(1000, "i4", stream=stream)
    stream.synchronize()
    buffer.copy_to(pinned, stream)
    assert (window == 1).all()
    stream.synchronize()
    assert (window == 0).all()
    window[:] = 2
    buffer.copy_from(pinned, stream)
    assert not (buffer.to_numpy() != 2).any()


@pytest.mark.parametrize("rows", [slice(None), slice(None, 32)])
def test_a_copy_into_a_pinned_array_returns_before_it_is_done(slow, rows):
    pinned = ringmem.PinnedBuffer((8, 64), "i4", device=slow)
    window = pinned.numpy()[:, rows]
    window[:] = 1
    buffer = ringmem.zeros(window.shape, "i4", device=slow)
    buffer.stream.synchronize()
    buffer.copy_to(window)
    assert (window == 1).all()
    buffer.stream.synchronize()
    assert (window == 0).all()


def test_a_pageable_target_is_complete_on_return(slow):
    buffer = ringmem.full(10, 3, "i4", device=slow)
    for target in (np.zeros(10, "i4"), np.zeros(20, "i4")[::2], np.zeros((10, 99), "i4")[:, 0]):
        buffer.copy_to(target)
        assert (target == 3).all()


def test_a_pageable_source_may_change_on_return(slow):
    for source in (np.ones(10, "i4"), np.ones(1 << 18, "i4"), np.ones(20, "i4")[::2]):
        buffer = ringmem.empty(source.shape, "i4", device=slow)
        buffer.copy_from(source)
        source[:] = 7
        assert (buffer.to_numpy() == 1).all()


def test_creating_filling_and_closing_never_wait(slow):
    stream = slow.create_stream()
    ringmem.empty(10, device=slow).close()  # the driver's pool is there now

    def work():
        for _ in range(20):
            with ringmem.zeros(1000, "f8", stream=stream) as buffer:
                buffer.fill(0.1)
            ringmem.PinnedBuffer(10, device=slow).close()
            ringmem.UnifiedBuffer(10, device=slow).close()

    assert elapsed(work) < 20 * LATENCY_S / 2
    stream.synchronize()


def test_dropping_a_pinned_buffer_under_a_copy_loses_nothing(slow):
    stream = slow.create_stream()
    buffer = ringmem.zeros(1000, "i4", device=slow)
    buffer.stream.synchronize()
    pinned = ringmem.PinnedBuffer(1000, "i4", device=slow)
    pinned.numpy()[:] = 5
    buffer.copy_from(pinned, stream)
    pinned.close()
    assert _native.reaper_pending() > 0
    stream.synchronize()
    assert (buffer.to_numpy() == 5).all()
    assert _native.flush_reaper(10)


def test_memory_is_not_reused_before_another_streams_work_is_done(slow):
    a, b = slow.create_stream(), slow.create_stream()
    source = ringmem.full(1 << 18, 1, "i4", stream=a)
    a.synchronize()
    seen = ringmem.PinnedBuffer(1 << 18, "i4", device=slow)
    source.copy_to(seen, b)  # reads `source` in 50 ms
    source.close()  # in the order of `a`
    again = ringmem.full(1 << 18, 2, "i4", stream=a)  # may well get the same memory
    b.synchronize()
    a.synchronize()
    assert (seen.numpy() == 1).all()
    again.close()


def test_record_stream_makes_freeing_wait_for_work_of_others(slow):
    own, foreign = slow.create_stream(), slow.create_stream()
    driver = slow.driver
    buffer = ringmem.full(1 << 18, 1, "i4", stream=own)
    own.synchronize()
    seen = ringmem.PinnedBuffer(1 << 18, "i4", device=slow)
    driver.copy_async(0, seen.ptr, buffer.ptr, buffer.nbytes, foreign.handle)
    buffer.record_stream(foreign)
    buffer.close()
    ringmem.full(1 << 18, 2, "i4", stream=own)
    foreign.synchronize()
    assert (seen.numpy() == 1).all()


def test_a_closed_stream_does_not_lose_the_memory_nor_free_it_early(slow):
    stream = slow.create_stream()
    source = ringmem.full(1 << 18, 1, "i4", stream=stream)
    seen = ringmem.PinnedBuffer(1 << 18, "i4", device=slow)
    source.copy_to(seen, stream)
    stream.close()
    with pytest.raises(ringmem.ClosedError, match="stream of"):
        source.fill(0)
    source.close()
    ringmem.full(1 << 18, 2, "i4", device=slow)
    assert _native.flush_reaper(10)
    assert (seen.numpy() == 1).all()


def test_to_numpy_and_host_views_wait_for_work_on_any_stream(slow):
    stream = slow.create_stream()
    for make in (ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer):
        buffer = make(10, "i4", device=slow)
        buffer.fill(6, stream)
        assert (buffer.to_numpy() == 6).all()
    for make in (ringmem.DeviceBuffer, ringmem.PinnedBuffer):
        for read in (np.asarray, memoryview, np.from_dlpack):
            buffer = make(10, "i4", device=slow)
            buffer.fill(6, stream)
            assert (np.asarray(read(buffer)) == 6).all()
    buffer = ringmem.UnifiedBuffer(10, "i4", device=slow)
    buffer.fill(6, stream)
    with buffer.host() as window:
        assert (window == 6).all()


def test_closing_on_another_stream_waits_for_both(slow):
    a, b = slow.create_stream(), slow.create_stream()
    source = ringmem.full(1 << 18, 1, "i4", stream=a)
    seen = ringmem.PinnedBuffer(1 << 18, "i4", device=slow)
    source.copy_to(seen, a)
    source.close(stream=b)
    ringmem.full(1 << 18, 2, "i4", stream=b)
    a.synchronize()
    b.synchronize()
    assert (seen.numpy() == 1).all()
