"""The driver's own pools: properties, figures, peers, other processes, a clean end."""

import gc
import os

import pytest

import ringmem
from ringmem import NativePool
from ringmem.native import _native

MIB = 1 << 20


def test_properties_are_what_was_asked(device):
    with NativePool(device, max_size="64 MiB", shareable=True) as pool:
        assert (pool.max_size, pool.handle_type) == (64 * MIB, "posix_fd")
        assert pool.handle > 0
        assert pool.release_threshold is None
        pool.release_threshold = "1 MiB"
        assert pool.release_threshold == MIB
    with NativePool(device) as plain:
        assert (plain.max_size, plain.handle_type) == (0, "none")
        with pytest.raises(ringmem.NotSupportedError):
            plain.export_fd()


def test_used_reserved_and_high_water_marks(device):
    with NativePool(device) as pool:
        block = pool.allocate(8 * MIB)
        first = pool.statistics()
        assert 8 * MIB <= first.used <= first.reserved
        block.close()
        device.default_stream.synchronize()
        assert pool.statistics().peak_used >= 8 * MIB
        pool.reset_peaks()
        assert pool.statistics().peak_used < 8 * MIB
        pool.trim()
        assert pool.statistics().reserved == 0


def test_max_size_is_a_limit(device):
    with NativePool(device, max_size="16 MiB") as pool, pytest.raises(ringmem.OutOfMemoryError):
        pool.allocate(64 * MIB)


def test_the_default_pool_is_not_destroyed(device):
    pool = NativePool.default(device)
    assert not pool.owned
    handle = pool.handle
    pool.destroy()
    assert NativePool.default(device).handle == handle
    with pytest.raises(ringmem.ClosedError):
        pool.allocate(1)


def test_typed_memory_and_scopes(device):
    with NativePool(device) as pool:
        with pool.empty(100, "i4") as buffer:
            buffer.fill(9)
            assert (buffer.to_numpy() == 9).all()
        with device.use(pool):
            buffer = ringmem.zeros(10, "i4", device=device)
        assert pool.live == 1
        buffer.close()


def pools_on(driver):
    """How many pools live on a FaultyDriver once the reaper has done its work."""
    gc.collect()
    _native.flush_reaper(10.0)
    return driver.live.get("pool", 0)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_failing_destroy_reports_and_leaves_no_handle(faulty, when, times):
    device = ringmem.devices_of(faulty)[0]
    pool = NativePool(device)
    pool.allocate(1000).close()
    for nth in range(1, times + 1):
        faulty.fail("pool_destroy", nth=nth, when=when)
    with pytest.raises(ringmem.DriverError, match="no block was alive") as caught:
        pool.destroy()
    assert caught.value.operation == "cuMemPoolDestroy"
    assert pool.closed
    pool.destroy()
    assert pools_on(faulty) == 0


def test_destroy_names_what_lives_and_refuses(faulty):
    device = ringmem.devices_of(faulty)[0]
    pool = NativePool(device)
    blocks = [pool.allocate(1000), pool.allocate(3 * MIB)]
    for _ in range(2):
        with pytest.raises(ringmem.InvalidValueError, match=r"2 live blocks of 3.001 MiB"):
            pool.destroy()
    assert not pool.closed
    assert "pool_destroy" not in faulty.calls or faulty.calls["pool_destroy"] == 0
    pool.allocate(10).close()
    for block in blocks:
        block.close()
    pool.destroy()
    assert pools_on(faulty) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_destroy_when_unused_waits_for_the_last_block(faulty, fails):
    device = ringmem.devices_of(faulty)[0]
    pool = NativePool(device)
    blocks = [pool.allocate(1000), pool.empty(1000, "f4")]
    pool.destroy(when_unused=True)
    assert pool.closed
    with pytest.raises(ringmem.ClosedError):
        pool.allocate(1)
    if fails:
        faulty.fail("pool_destroy", nth=1)
    blocks.pop().close()
    assert faulty.live["pool"] == 1
    blocks.pop().close()
    assert pools_on(faulty) == 0
    pool.destroy()


def test_a_pool_dropped_with_live_blocks_is_destroyed_after_them(faulty):
    device = ringmem.devices_of(faulty)[0]
    block = NativePool(device).allocate(1000)
    gc.collect()
    assert faulty.live["pool"] == 1
    block.close()
    del block
    assert pools_on(faulty) == 0


def test_an_exception_in_the_with_block_is_not_hidden_by_live_blocks(faulty):
    device = ringmem.devices_of(faulty)[0]
    with pytest.raises(KeyError), NativePool(device) as pool:
        block = pool.allocate(1000)
        raise KeyError
    block.close()
    assert pools_on(faulty) == 0


def test_memory_that_runs_out_leaves_a_pool_that_can_be_destroyed(faulty):
    device = ringmem.devices_of(faulty)[0]
    pool = NativePool(device, max_size="16 MiB")
    block = pool.allocate(MIB)
    with pytest.raises(ringmem.OutOfMemoryError):
        pool.allocate(64 * MIB)
    assert (pool.live, pool.live_nbytes) == (1, MIB)
    pool.destroy(when_unused=True)
    block.close()
    assert pools_on(faulty) == 0


def test_a_failing_creation_leaves_no_pool(faulty):
    device = ringmem.devices_of(faulty)[0]
    faulty.fail("pool_set", nth=1)
    with pytest.raises(ringmem.DriverError):
        NativePool(device)
    assert faulty.live.get("pool", 0) == 0


def test_a_peer_of_another_driver_is_refused_with_a_remedy():
    first, stranger = (ringmem.simulate().devices[0] for _ in range(2))
    with (
        NativePool(first) as pool,
        pytest.raises(
            ringmem.InvalidValueError, match=r"a simulation's.*give a device of the pool"
        ),
    ):
        pool.access(stranger)


def test_access_for_peers():
    with ringmem.simulate(devices=2, peers=True) as simulation:
        first, second = simulation.devices
        with NativePool(first) as pool:
            assert pool.access(second) == "none"
            pool.set_access(second, "readwrite")
            assert pool.access("cpu:1") == "readwrite"
            with pytest.raises(ringmem.InvalidValueError):
                pool.set_access(first)
            with pytest.raises(ringmem.InvalidValueError):
                pool.set_access(second, "write")


def test_a_pool_goes_to_another_object_by_descriptor(device):
    with NativePool(device, shareable=True) as pool, pool.allocate(4096) as block:
        fd = pool.export_fd()
        try:
            imported = NativePool.import_fd(fd, device)
        finally:
            os.close(fd)
        assert imported.imported
        data = pool.native_allocator is not None and pool.export_pointer(block.ptr)
        ptr = imported.import_pointer(data)
        assert ptr
        imported.free_pointer(ptr)
        device.default_stream.synchronize()
        imported.destroy()
        with pytest.raises(ringmem.InvalidValueError):
            pool.import_pointer(b"short")


def test_a_device_without_pools_says_so():
    with ringmem.simulate(pools=False) as simulation, pytest.raises(ringmem.NotSupportedError):
        NativePool(simulation.devices[0])
