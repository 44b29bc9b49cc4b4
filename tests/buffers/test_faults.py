"""Every driver call of every operation fails once: nothing is lost, the error says what failed."""

import contextlib
import gc
import warnings

import numpy as np
import pytest

import ringmem
from ringmem.native import _native


def create_and_close(device, make, streams):
    with make((10, 100), "f4", device=device):
        pass


def drop(device, make, streams):
    make(10, "f8", device=device)


def use_on_two_streams(device, make, streams):
    a, b = streams
    with make(100, "i4", stream=a) as buffer:
        buffer.fill(1)
        buffer.fill(2, b)
        buffer.fill(3, device.default_stream)


def fill_long_patterns(device, make, streams):
    for dtype in ("f8", "V200"):
        with make(50, dtype, device=device) as buffer:
            buffer.fill(0.1 if dtype == "f8" else np.void(bytes(range(200))))


def copy_arrays(device, make, streams):
    with make((8, 64), "f4", device=device) as buffer:
        packed, wide = np.zeros((8, 64), "f4"), np.zeros((8, 100), "f4")
        for array in (packed, wide[:, :64], np.zeros((64, 8), "f4").T):
            buffer.copy_from(array)
            buffer.copy_to(array)
        buffer.to_numpy()


def copy_buffers(device, make, streams):
    stream = streams[0]
    with make(100, "f4", device=device) as a, ringmem.PinnedBuffer(100, "f4", device=device) as b:
        a.copy_from(b, stream)
        b.copy_from(a, stream)
        a.copy().close()


def copy_devices(device, make, streams):
    second = ringmem.devices_of(device.driver)[1]
    with make(100, "f4", device=device) as a, ringmem.empty(100, "f4", device=second) as b:
        b.copy_from(a)
        b.copy_to(a)


def make_filled(device, make, streams):
    ringmem.zeros(10, "f4", device=device).close()
    ringmem.full(10, 0.1, "f8", device=device).close()
    ringmem.from_array(np.arange(10)[::2], device=device).close()


def pin_array(device, make, streams):
    ringmem.pin(np.zeros(100), device=device).close()


def hand_to_host(device, make, streams):
    with ringmem.UnifiedBuffer(100, "f4", device=device) as buffer:
        with buffer.host() as array:
            array[:] = 1
            del array
        if device.capabilities.concurrent_managed_access:
            buffer.prefetch("host")
            buffer.prefetch()
            buffer.advise("set_read_mostly")
            buffer.discard()


def attach_to_a_stream(device, make, streams):
    with ringmem.UnifiedBuffer(100, stream=streams[0], attach="single"):
        pass


def export(device, make, streams):
    with make(100, "f4", device=device) as buffer:
        for read in (np.asarray, np.from_dlpack, memoryview):
            with contextlib.suppress(ringmem.NotSupportedError):  # managed memory has no host view
                read(buffer)
        buffer.__dlpack__(copy=True) if make is ringmem.DeviceBuffer else None


def write_combined(device, make, streams):
    ringmem.PinnedBuffer(100, device=device, write_combined=True).close()


OPERATIONS = [create_and_close, drop, use_on_two_streams, fill_long_patterns, copy_arrays,
              copy_buffers, copy_devices, export]  # fmt: skip
SINGLE = [make_filled, pin_array, hand_to_host, attach_to_a_stream, write_combined]
PLAIN = "devices=2"
POOR = "devices=2,concurrent_managed_access=0"
CASES = [
    *((operation, make, PLAIN) for operation in OPERATIONS for make in (
        ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer)),
    *((operation, ringmem.DeviceBuffer, PLAIN) for operation in SINGLE),
    (hand_to_host, ringmem.DeviceBuffer, POOR),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick_collection():
    """The sweep collects garbage a thousand times: what is here already is left out of it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def run(live_objects, operation, make, settings, nth=None, when="before"):
    """One run on fresh devices; returns the number of calls made and what was raised."""
    driver = _native.FaultyDriver(_native.HostDriver(settings))
    devices = ringmem.devices_of(driver)  # alive throughout: so are the pools behind them
    device = devices[0]
    device.capabilities  # noqa: B018 - asked once in the life of a device
    # What happens to a stream that cannot be destroyed is floor 1's affair.
    streams = device.create_stream(), device.create_stream()
    before = sum(driver.calls.values())
    if nth is not None:
        driver.fail("*", nth=nth, when=when)
    raised = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a free that fails after the fact is reported
        try:
            operation(device, make, streams)
        except (ringmem.RingmemError, BufferError) as error:
            raised = error.with_traceback(None)
            raised.__context__ = raised.__cause__ = None
        assert _native.flush_reaper(10)
        calls = sum(driver.calls.values()) - before
        driver.clear()
        del device, devices, streams
        left = live_objects(driver)
    return calls, raised, left


@pytest.mark.parametrize(("operation", "make", "settings"), CASES)
def test_no_failing_call_loses_anything(live_objects, operation, make, settings):
    calls, raised, left = run(live_objects, operation, make, settings)
    assert (raised, left) == (None, {})
    assert calls > 0
    seen = 0
    for when in ("before", "after"):
        for nth in range(1, calls + 1):
            _, raised, left = run(live_objects, operation, make, settings, nth, when)
            assert left == {}, f"call {nth} failing {when}: {raised!r}"
            seen += raised is not None
    assert seen > 0


@pytest.mark.parametrize("make", [ringmem.DeviceBuffer, ringmem.PinnedBuffer])
def test_an_allocation_that_fails_names_the_call(faulty, make):
    device = ringmem.devices_of(faulty)[0]
    operation, name = {
        ringmem.DeviceBuffer: ("pool_alloc_async", "cuMemAllocFromPoolAsync"),
        ringmem.PinnedBuffer: ("host_alloc", "cuMemHostAlloc"),
    }[make]
    faulty.fail(operation, status=_native.Status.out_of_memory)
    with pytest.raises(ringmem.OutOfMemoryError, match=f"{name}.*4096 bytes") as caught:
        make(4096, device=device)
    assert caught.value.operation == name
    make(4096, device=device).close()


def test_a_device_that_failed_for_good_ends_every_operation_and_loses_nothing_of_ours(faulty):
    device = ringmem.devices_of(faulty)[0]
    buffer = ringmem.zeros(10, "f4", device=device)
    faulty.fail("copy_async", when="sticky", status=_native.Status.illegal_address)
    with pytest.raises(ringmem.DriverError, match="ILLEGAL_ADDRESS"):
        buffer.to_numpy()
    with pytest.raises(ringmem.DriverError):
        buffer.fill(0)
    with pytest.raises(ringmem.DriverError):
        buffer.close()
    faulty.clear()
    buffer.close()


def test_memory_that_is_on_its_way_back_is_waited_for_before_running_out():
    driver = _native.FaultyDriver(_native.HostDriver("devices=1"))
    device = ringmem.devices_of(driver)[0]
    first = ringmem.PinnedBuffer(1 << 20, device=device)
    driver.delay("host_free", 0.05)
    first.close()
    driver.fail("host_alloc", status=_native.Status.out_of_memory)
    second = ringmem.PinnedBuffer(1 << 20, device=device)
    assert second.ptr
    assert driver.calls["host_alloc"] == 3
    assert driver.calls["host_free"] == 1
