"""Every driver call of every operation fails once, before or after it was done."""

import gc
import os
import threading
import time

import numpy as np
import pytest

import ringmem
from ringmem import ClosedError, DriverError
from ringmem.native import _native
from ringmem.virtual import (
    AddressRange,
    GrowableBuffer,
    PhysicalMemory,
    SparseBuffer,
    attach,
    set_recycle_limit,
)

from .conftest import CONFIG, PAGE, fill_now, live_objects


def run_and_close(buffer, body):
    """Close the buffer whatever happens; a failed close can be repeated."""
    failure = None
    try:
        body()
    except (DriverError, ClosedError) as error:
        failure = error.with_traceback(None)  # which would keep views alive
    for _ in range(3):
        try:
            buffer.close()
        except DriverError as error:
            failure = error.with_traceback(None)
            continue
        break
    assert buffer.closed
    if failure is not None:
        raise failure


def primitives(device):
    addresses = AddressRange.reserve(device, 4 * PAGE)
    memory = PhysicalMemory.create(device, PAGE)
    mapping = addresses.map(memory, PAGE)
    mapping.set_access({device: "read"})
    addresses.map(memory, 3 * PAGE).unmap(device.default_stream)
    mapping.unmap()
    memory.close()
    addresses.close()


def growable(device):
    buffer = GrowableBuffer(64 * PAGE, device=device, max_handle_nbytes=2 * PAGE)

    def body():
        buffer.resize(5 * PAGE)
        buffer.reserve_ahead(4 * PAGE)
        buffer.settle()
        buffer.resize(20 * PAGE)
        buffer.fill(1)
        buffer.resize(3 * PAGE)
        buffer.settle()
        buffer.resize(8 * PAGE)
        buffer.fill(2)
        device.synchronize()

    run_and_close(buffer, body)


def sparse(device):
    buffer = SparseBuffer(16 * PAGE, device=device, read_zero=True, cache_nbytes=2 * PAGE)

    def body():
        buffer.map([0, 1, 5, 6, 7])
        buffer.view(5 * PAGE, 7 * PAGE).fill(1)
        buffer.unmap([1, 6, 7])
        buffer.settle()
        buffer.map([6, 10])
        buffer.view(6 * PAGE, 7 * PAGE).fill(2)
        device.synchronize()

    run_and_close(buffer, body)


def sharing(device):
    buffer = GrowableBuffer(8 * PAGE, device=device, shape=6 * PAGE, max_handle_nbytes=2 * PAGE)

    def body():
        shared = attach(buffer.share(), device)

        def use():
            shared.view().fill(1)
            device.synchronize()

        run_and_close(shared, use)

    run_and_close(buffer, body)


def recycling(device):
    """Handles go from one buffer to the next, zeroed on the way."""
    set_recycle_limit(1 << 20)
    try:
        for _ in range(2):
            buffer = GrowableBuffer(
                8 * PAGE, device=device, max_handle_nbytes=PAGE, shareable=False
            )

            def body(buffer=buffer):
                buffer.resize(3 * PAGE)
                assert not buffer.view().to_numpy().any()
                buffer.fill(1)
                buffer.resize(0)
                buffer.settle()

            run_and_close(buffer, body)
    finally:
        set_recycle_limit(0)


def peers(device):
    """Access for two devices, as it grows; then an attachment for the peer, which may only read."""
    other = ringmem.devices_of(device.driver)[1]
    buffer = GrowableBuffer(32 * PAGE, device=device, shape=PAGE, max_handle_nbytes=2 * PAGE)

    def body():
        buffer.set_access({other: "read", device: "readwrite"})
        buffer.resize(7 * PAGE)
        memory = PhysicalMemory.create(other, PAGE)
        again = PhysicalMemory.import_fd(descriptor := memory.export_fd(), PAGE, other)
        os.close(descriptor)
        with AddressRange.reserve(device, 2 * PAGE) as addresses:
            both = addresses.map(again, PAGE, access={device: "readwrite", other: "readwrite"})
            assert both.get_access(other) == "readwrite"
            both.unmap([])
        shared = attach(buffer.share("read"), other)
        run_and_close(shared, lambda: shared.view().to_numpy())

    run_and_close(buffer, body)


def forgotten(device):
    """Nothing is closed: finalizers and the mapping thread give everything back."""
    buffer = GrowableBuffer(16 * PAGE, device=device, shape=5 * PAGE, max_handle_nbytes=2 * PAGE)
    buffer.fill(1)
    shared = attach(buffer.share(), device)
    shared.view().fill(2)
    pages = SparseBuffer(8 * PAGE, device=device, cache_nbytes=PAGE)
    pages.map([0, 1, 4])
    pages.unmap([1])
    AddressRange.reserve(device, 2 * PAGE).map(PhysicalMemory.create(device, PAGE), PAGE)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "scenario", [primitives, growable, sparse, sharing, recycling, peers, forgotten]
)
def test_whatever_call_fails_nothing_is_lost(scenario, when):
    nth = 0
    while True:
        nth += 1
        driver = _native.FaultyDriver(_native.HostDriver(CONFIG))
        device = ringmem.devices_of(driver)[0]
        device.default_stream.synchronize()
        driver.fail("*", nth=nth, when=when)
        failed = False
        try:
            scenario(device)
        except (DriverError, ClosedError) as error:
            failed = True
            error.with_traceback(None)  # which would keep what was forgotten
        unused = driver.pending > 0
        driver.clear()
        assert live_objects(driver) == {}, f"call {nth} failed {when}"
        primitives(device)  # and the device is as usable as before
        assert live_objects(driver) == {}
        if unused and not failed:
            break
    assert nth > 10


@pytest.mark.parametrize("operation", ["mem_create", "mem_map", "mem_set_access"])
def test_a_growth_that_fails_leaves_the_old_size_and_bytes(device, faulty, operation):
    with GrowableBuffer(64 * PAGE, device=device, shape=2 * PAGE, max_handle_nbytes=PAGE) as buffer:
        buffer.fill(7)
        device.synchronize()
        for nth in (1, 2, 3):
            faulty.fail(operation, nth=nth)
            try:
                buffer.resize(6 * PAGE)
            except DriverError:
                assert buffer.shape == (2 * PAGE,)
            else:
                buffer.resize(2 * PAGE)
                buffer.settle()
            faulty.clear()
            assert buffer.view().to_numpy().min() == 7
            assert buffer.committed == 2 * PAGE


def test_an_unmap_that_happened_although_it_failed_is_not_built_upon(device, faulty):
    with GrowableBuffer(64 * PAGE, device=device, shape=8 * PAGE, max_handle_nbytes=PAGE) as buffer:
        faulty.fail("mem_unmap", when="after")
        buffer.resize(2 * PAGE)
        buffer.settle()
        buffer.resize(8 * PAGE)
        buffer.fill(1)
        device.synchronize()  # nothing faulted


def test_a_close_that_cannot_unmap_leaves_it_open_and_empty_and_can_be_repeated(device, faulty):
    for make in (GrowableBuffer, SparseBuffer):
        buffer = make(4 * PAGE, device=device)
        if make is GrowableBuffer:
            buffer.resize(3 * PAGE)
        else:
            buffer.map([0, 2])
        faulty.fail("mem_unmap")
        with pytest.raises(DriverError, match="cuMemUnmap"):
            buffer.close()
        assert not buffer.closed
        if make is GrowableBuffer:
            assert buffer.shape == (0,)
        faulty.clear()
        buffer.close()
        assert buffer.closed


def test_a_close_that_cannot_wait_changes_nothing(device, faulty):
    buffer = GrowableBuffer(4 * PAGE, device=device, shape=3 * PAGE)
    buffer.fill(4)
    faulty.fail("event_record")
    with pytest.raises(DriverError, match="cuEventRecord"):
        buffer.close()
    assert np.all(buffer.view().to_numpy() == 4)
    buffer.close()


@pytest.mark.parametrize("make", [GrowableBuffer, SparseBuffer])
def test_a_forgotten_buffer_whose_work_nobody_can_wait_for_stays_and_the_device_lives(make):
    driver = _native.FaultyDriver(_native.HostDriver(f"{CONFIG},latency_s=0.05"))
    device = ringmem.devices_of(driver)[0]
    buffer = make(4 * PAGE, device=device)
    if make is GrowableBuffer:
        buffer.resize(4 * PAGE)
    else:
        buffer.map(range(4))
    device.driver.fill_async(0, buffer.ptr, 1, 1, 4 * PAGE, 0)
    driver.fail("event_record", when="sticky")
    del buffer
    gc.collect()
    driver.clear()
    device.default_stream.synchronize()  # the fill found its pages
    primitives(device)


@pytest.mark.parametrize("make", [GrowableBuffer, SparseBuffer])
@pytest.mark.parametrize("end", ["shrink", "close", "drop", "drop without an event"])
def test_what_a_closed_stream_was_given_is_done_before_pages_go(make, end):
    driver = _native.FaultyDriver(_native.HostDriver(f"{CONFIG},latency_s=0.1"))
    device = ringmem.devices_of(driver)[0]
    buffer = make(4 * PAGE, "u1", device)
    if make is GrowableBuffer:
        buffer.resize(4 * PAGE)
    else:
        buffer.map(range(4))
    stream = device.create_stream()
    buffer.record_stream(stream)
    buffer.view(0, 4 * PAGE).fill(1, stream) if make is SparseBuffer else buffer.fill(1, stream)
    if end == "drop without an event":
        driver.fail("event_create")
    stream.close()
    if end == "close":
        buffer.close()
    elif end == "shrink":
        buffer.resize(0) if make is GrowableBuffer else buffer.unmap(range(4))
        buffer.settle()
        buffer.close()
    else:
        del buffer
        gc.collect()
    del stream
    device.synchronize()  # the device is lost if the fill found no pages
    primitives(device)
    assert live_objects(driver) == {}


def test_threads_may_record_and_close_streams_while_others_resize():
    device = ringmem.devices_of(_native.HostDriver(f"{CONFIG},latency_s=0.002"))[0]
    buffer = GrowableBuffer(8 * PAGE, "u1", device, shape=8 * PAGE)
    errors = []

    def work(number):
        try:
            for _ in range(60):
                stream = device.create_stream()
                buffer.record_stream(stream)
                stream.close()
                if number % 2:
                    buffer.resize(4 * PAGE)
                    buffer.resize(8 * PAGE)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    buffer.close()


def test_a_view_shows_what_a_closed_stream_wrote():
    device = ringmem.devices_of(_native.HostDriver(f"{CONFIG},latency_s=0.1"))[0]
    buffer = GrowableBuffer(4 * PAGE, "u1", device, shape=4 * PAGE)
    stream = device.create_stream()
    buffer.fill(3, stream)
    stream.close()
    assert np.all(buffer.view().to_numpy() == 3)
    buffer.close()


@pytest.mark.parametrize("make", [GrowableBuffer, SparseBuffer])
def test_a_forgotten_buffer_that_cannot_be_unmapped_is_given_up_at_some_time(make):
    driver = _native.FaultyDriver(_native.HostDriver(CONFIG))
    device = ringmem.devices_of(driver)[0]
    buffer = make(4 * PAGE, device=device)
    if make is GrowableBuffer:
        buffer.resize(4 * PAGE)
    else:
        buffer.map(range(4))
    driver.fail("mem_unmap", times=10**9)
    before = driver.calls.get("mem_unmap", 0)
    del buffer
    gc.collect()
    calls, deadline = [-1, -2], time.monotonic() + 20
    while calls[-1] != calls[-2] and time.monotonic() < deadline:
        time.sleep(0.3)
        calls.append(driver.calls["mem_unmap"] - before)
    assert 2 <= calls[-1] == calls[-2] <= 1000, calls
    driver.clear()
    primitives(device)


def test_a_device_that_is_lost_gives_everything_back(faulty, device):
    buffer = GrowableBuffer(8 * PAGE, device=device, shape=8 * PAGE)
    with (
        AddressRange.reserve(device, PAGE) as nothing,
        pytest.raises(DriverError, match="ILLEGAL_ADDRESS"),
    ):
        fill_now(device, nothing.ptr, 16)
    buffer.resize(0)
    buffer.settle()
    buffer.close()
    assert buffer.closed
