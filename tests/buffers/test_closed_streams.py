"""A closed stream may still have work; whoever comes after that comes after all of it."""

import threading
import time
import warnings

import numpy as np
import pytest

import ringmem
from ringmem.device import as_stream
from ringmem.native import _native

MIB = 1 << 20


def filled(make, device, value=6):
    """A buffer that will be `value` when its closed stream is done."""
    buffer = make(10, "i4", device=device)
    with device.create_stream(non_blocking=True) as stream:
        buffer.fill(value, stream)
    stream.close()
    return buffer


@pytest.mark.parametrize("make", [ringmem.DeviceBuffer, ringmem.PinnedBuffer])
@pytest.mark.parametrize("read", [np.asarray, memoryview, np.from_dlpack])
def test_the_host_reads_what_a_closed_stream_writes(slow, make, read):
    assert (np.asarray(read(filled(make, slow))) == 6).all()


@pytest.mark.parametrize(
    "make", [ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer]
)
def test_to_numpy_waits_for_closed_streams(slow, make):
    assert (filled(make, slow).to_numpy() == 6).all()


def test_managed_memory_is_shown_after_the_work_of_closed_streams(slow):
    with filled(ringmem.UnifiedBuffer, slow).host() as window:
        assert (window == 6).all()


def test_a_buffer_whose_own_stream_was_closed_is_read_when_that_is_done(slow):
    stream = slow.create_stream()
    buffer = ringmem.full(10, 6, "i4", device=slow, stream=stream)
    stream.close()
    assert (np.asarray(buffer) == 6).all()


def test_a_pinned_target_of_a_closed_stream_is_complete_when_read(slow):
    pinned = ringmem.PinnedBuffer(10, "i4", device=slow)
    pinned.numpy()[:] = 0
    source = ringmem.full(10, 7, "i4", device=slow)
    slow.default_stream.synchronize()
    stream = slow.create_stream()
    source.copy_to(pinned, stream)
    stream.close()
    assert (np.asarray(pinned) == 7).all()


@pytest.mark.parametrize("lost", [None, "event_create", "event_record"])
def test_a_consumers_stream_comes_after_closed_streams(lost):
    driver = _native.FaultyDriver(_native.HostDriver("latency_s=0.05"))
    device = ringmem.devices_of(driver)[0]
    buffer = ringmem.zeros(10, "i4", device=device)
    device.synchronize()
    writer, reader = device.create_stream(), device.create_stream()
    buffer.fill(6, writer)
    if lost:  # no event tells of the work then; the device does
        driver.fail(lost)
    writer.close()
    _native.buffer_let_wait(buffer, device, reader.handle)
    assert buffer.to_numpy(reader).tolist() == [6] * 10
    buffer.close()


def test_a_device_copy_comes_after_closed_streams():
    with ringmem.simulate(devices=2, latency_s=0.05) as simulation:
        a, b = simulation.devices
        target = ringmem.empty(10, "i4", device=b)
        target.copy_from(filled(ringmem.DeviceBuffer, a))
        assert (target.to_numpy() == 6).all()


def test_work_on_another_stream_comes_after_closed_streams(slow):
    other = slow.create_stream(non_blocking=True)
    assert (filled(ringmem.DeviceBuffer, slow).to_numpy(other) == 6).all()
    assert (filled(ringmem.DeviceBuffer, slow).copy(other).to_numpy(other) == 6).all()
    target = ringmem.zeros(10, "i4", device=slow, stream=other)
    pinned = filled(ringmem.PinnedBuffer, slow)
    target.copy_from(_native.buffer_host_array(pinned, False), other)
    assert (target.to_numpy(other) == 6).all()
    buffer = filled(ringmem.DeviceBuffer, slow)
    buffer.fill(7, other)
    assert (buffer.to_numpy() == 7).all()


def test_waiting_for_a_closed_stream_in_a_capture_is_refused_before_it_is_spoiled():
    driver = _native.FaultyDriver(_native.HostDriver("latency_s=0.05"))
    device = ringmem.devices_of(driver)[0]
    buffer = filled(ringmem.DeviceBuffer, device)
    stream = device.create_stream(non_blocking=True)
    driver.begin_capture(device.ordinal, stream.handle)
    with pytest.raises(ringmem.DriverError, match="ISOLATION"):
        _native.buffer_let_wait(buffer, device, stream.handle)
    with pytest.raises(ringmem.DriverError, match="ISOLATION"):
        buffer.fill(1, stream)
    device.default_stream.synchronize()  # all is done, and nothing is left to wait for
    time.sleep(0.1)
    buffer.fill(1, stream)
    driver.end_capture(device.ordinal, stream.handle)
    device.synchronize()
    buffer.close()


def test_a_closed_stream_is_forgotten_when_it_is_done(slow):
    buffer = ringmem.zeros(10, "i4", device=slow)
    for _ in range(40):
        stream = slow.create_stream()
        buffer.fill(1, stream)
        stream.synchronize()
        stream.close()
    assert len(_native.buffer_closed_streams(buffer)) < 20


def test_the_host_packs_a_pinned_array_after_the_streams_work(slow):
    """A strided array of too many dimensions is packed by the host."""
    stream = slow.create_stream()
    source = ringmem.full(8, 7, "i4", device=slow, stream=stream)
    pinned = ringmem.PinnedBuffer(8, "i4", device=slow)
    array = pinned.numpy()
    array[:] = 0
    buffer = ringmem.zeros(8, "i4", device=slow, stream=stream)
    source.copy_to(pinned, stream)
    buffer.copy_from(array[::-1], stream)
    assert (buffer.to_numpy() == 7).all()
    other = slow.create_stream()
    pinned.fill(9, other)
    buffer.copy_from(array[::-1], stream)
    assert (buffer.to_numpy() == 9).all()


def test_the_host_unpacks_into_a_pinned_array_after_the_streams_work(slow):
    stream = slow.create_stream()
    pinned = ringmem.PinnedBuffer(8, "i4", device=slow)
    array = pinned.numpy()
    array[:] = 3
    kept = ringmem.zeros(8, "i4", device=slow)
    source = ringmem.full(8, 7, "i4", device=slow)
    slow.synchronize()
    kept.copy_from(pinned, stream)
    source.copy_to(array[::-1])
    assert (kept.to_numpy() == 3).all()
    assert (array == 7).all()


def test_a_stream_with_the_handle_of_a_closed_one_is_another(own_device):
    """CUDA gives handles again, the simulation never does."""
    buffer = ringmem.zeros(64 * MIB, "u1", device=own_device)
    own_device.default_stream.synchronize()
    for value in range(1, 30):
        first = own_device.create_stream(non_blocking=True)
        handle = first.handle
        buffer.fill(0, first)
        first.synchronize()
        first.close()
        with own_device.create_stream(non_blocking=True) as second:
            for _ in range(3):
                buffer.fill(value, second)
        again = second.handle == handle
        second.close()
        assert buffer[-4:].to_numpy().tolist() == [value] * 4
        if again:
            break


def test_managed_memory_is_shown_after_closed_streams_on_another_stream_too(slow):
    own, other = slow.create_stream(), slow.create_stream()
    buffer = ringmem.UnifiedBuffer(10, "i4", device=slow, stream=own)
    buffer.fill(7)
    own.close()
    with buffer.host(stream=other) as window:
        assert (window == 7).all()


def test_managed_memory_comes_back_from_the_host_when_its_stream_was_closed():
    with ringmem.simulate(concurrent_managed_access=False) as simulation:
        device = simulation.devices[0]
        own, other = device.create_stream(), device.create_stream()
        buffer = ringmem.UnifiedBuffer(10, "i4", device=device, stream=own)
        own.close()
        with buffer.host(stream=other) as window:
            window[:] = 3
            del window
        buffer.fill(4, other)
        assert (buffer.to_numpy(other) == 4).all()


def test_closed_streams_that_are_done_cost_nothing_more(slow):
    buffer = ringmem.zeros(10, "i4", device=slow)
    for _ in range(5):
        stream = slow.create_stream()
        buffer.fill(1, stream)
        stream.close()
    assert len(_native.buffer_closed_streams(buffer)) == 5
    slow.synchronize()
    buffer.fill(2)
    assert _native.buffer_closed_streams(buffer) == []


def test_a_foreign_stream_that_was_closed_is_waited_for_once(slow):
    stream = slow.create_stream()
    foreign = as_stream(stream.handle, slow)
    buffer = ringmem.zeros(10, "i4", device=slow)
    slow.default_stream.synchronize()  # which a stream that does not block does not wait for
    buffer.fill(5, foreign)
    foreign.close()
    assert (buffer.to_numpy() == 5).all()
    slow.default_stream.synchronize()
    stream.synchronize()
    buffer.fill(6)
    assert _native.buffer_closed_streams(buffer) == []


@pytest.mark.parametrize("make", [ringmem.Pool, ringmem.PinnedPool])
def test_a_pool_closes_after_buffers_of_closed_streams_that_are_done(device, make):
    for _ in range(20):
        pool = make(device)
        stream = device.create_stream()
        kind = ringmem.PinnedBuffer if make is ringmem.PinnedPool else ringmem.DeviceBuffer
        buffer = kind(100, "u1", device=device, stream=stream, allocator=pool)
        buffer.fill(1)
        stream.close()
        device.synchronize()
        buffer.close()
        if make is ringmem.Pool:
            pool.close()
        else:
            assert _native.flush_reaper(10)
            pool.close()


class Plain:
    """A user's allocator, whose first deallocate fails."""

    def __init__(self, device):
        self.blocks = _native.FaultyDriver(device.driver)
        self.failures = 1

    def allocate(self, nbytes, stream):
        return self.blocks.mem_alloc(0, nbytes)

    def deallocate(self, ptr, nbytes, stream):
        self.failures -= 1
        if self.failures == 0:
            raise OSError("not yet")
        self.blocks.stream_synchronize(0, stream)
        self.blocks.mem_free(0, ptr)


@pytest.mark.parametrize("end", ["close", "drop"])
@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        (ringmem.DeviceBuffer, "mem_free_async"),
        (ringmem.PinnedBuffer, "event_record"),
        (ringmem.UnifiedBuffer, "event_record"),
        ("python", None),
        ("resident", "event_record"),
    ],
)
def test_a_stream_may_be_closed_after_a_free_that_failed(kind, fails, end):
    """Then the allocator was told of the stream already."""
    driver = _native.FaultyDriver(_native.HostDriver("latency_s=0.05"))
    device = ringmem.devices_of(driver)[0]
    allocator = None
    if kind == "python":
        allocator, kind = Plain(device), ringmem.DeviceBuffer
    elif kind == "resident":
        kind, allocator = ringmem.DeviceBuffer, ringmem.residency.tag("closed", device=device)
    buffer = kind(1000, "i4", device=device, allocator=allocator)
    stream = device.create_stream(non_blocking=True)
    buffer.fill(6, stream)
    if fails:
        driver.fail(fails)
    with pytest.raises((ringmem.DriverError, OSError)):
        buffer.close()
    assert not buffer.closed
    stream.close()
    if end == "close":
        buffer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del buffer
        assert _native.flush_reaper(10)
    assert driver.calls.get("synchronize", 0) == 0


def test_what_a_closed_stream_does_for_ever_holds_up_no_other_release(slow):
    opened = threading.Event()
    kept, freed = (ringmem.DeviceBuffer(10, "i4", device=slow) for _ in range(2))
    for buffer, work in ((kept, lambda: opened.wait(30)), (freed, lambda: None)):
        with slow.create_stream(non_blocking=True) as stream:
            slow.driver.launch_host_function(0, stream.handle, work)
            buffer.fill(1, stream)
        stream.close()
    try:
        kept.close()
        freed.close()
        until = time.monotonic() + 10
        while _native.reaper_pending() > 1 and time.monotonic() < until:
            time.sleep(0.001)
        assert _native.reaper_pending() == 1
    finally:
        opened.set()
    assert _native.flush_reaper(10)
