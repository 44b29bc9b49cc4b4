"""Every driver call of every operation fails once, before or after it was done."""

import pytest

import ringmem
from ringmem import ClosedError, DriverError
from ringmem.native import _native
from ringmem.virtual import AddressRange, GrowableBuffer, PhysicalMemory, SparseBuffer, attach

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


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("scenario", [primitives, growable, sparse, sharing])
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
        except (DriverError, ClosedError):
            failed = True
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
