"""What floor 1 promises holds on every platform: a simulated device, a strict one, and CUDA."""

import threading
import time

import numpy as np
import pytest

import ringmem
from ringmem.device.peer_copy import CopyRoute
from ringmem.device.staging import CHUNK_NBYTES
from ringmem.native import _native

PLATFORMS = [
    "cpu",
    "strict cpu",
    pytest.param("cuda", marks=pytest.mark.cuda),
]


@pytest.fixture(params=PLATFORMS)
def device(request):
    """The first device of each platform; overrides the simulated one of the other tests."""
    if request.param == "cuda":
        found = ringmem.devices("cuda")
        if not found:
            pytest.skip("there is no CUDA device")
        yield found[0]
    else:
        with ringmem.simulate(capacity="256 MiB", strict=request.param.startswith("s")) as made:
            yield made.devices[0]


class Memory:
    """Device memory from the device's own pool or plain, filled from and read into NumPy."""

    def __init__(self, device, data):
        self.device, self.nbytes = device, data.nbytes
        self.ptr = device.driver.mem_alloc(device.ordinal, data.nbytes)
        self._copy(self.ptr, data.ctypes.data)

    def read(self):
        data = np.zeros(self.nbytes, np.uint8)
        self._copy(data.ctypes.data, self.ptr)
        return data

    def free(self):
        self.device.driver.mem_free(self.device.ordinal, self.ptr)

    def _copy(self, dst, src):
        self.device.driver.copy_async(self.device.ordinal, dst, src, self.nbytes, 0)
        self.device.default_stream.synchronize(timeout_s=30)


def pattern(nbytes):
    return np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8)


def test_a_device_describes_itself(device):
    capabilities = device.capabilities
    info = device.memory_info()
    assert device.product_name
    assert "-" in device.uuid
    assert 0 < info.free <= info.total
    assert capabilities.multiprocessor_count > 0
    assert device.granularity % 4096 == 0
    assert capabilities.recommended_granularity_nbytes % device.granularity == 0
    assert (capabilities.pci_address is None) == (device.platform == "cpu")
    if device.platform == "cuda":
        assert device.compute_capability >= (5, 0)
        assert not device.host_accessible


def test_a_blocked_stream_is_pending_times_out_and_goes_on(device, gate):
    event = device.create_event()
    gate.close()
    event.record(gate.stream)
    assert gate.stream.query() is False
    assert event.query() is False
    for pending in (gate.stream, event):
        with pytest.raises(ringmem.TimeoutError, match=f"of {device.name} .* after 0.02 s"):
            pending.synchronize(timeout_s=0.02)
    threading.Timer(0.02, gate.open).start()
    event.synchronize()
    gate.stream.synchronize(timeout_s=10)
    assert gate.stream.query()


def test_streams_order_each_other_on_the_device(device, gate):
    second, third = device.create_stream(), device.create_stream(priority=-1)
    gate.close()
    second.wait(gate.stream)
    third.wait(second.record())
    assert not third.query()
    gate.open()
    third.synchronize(timeout_s=10)
    for stream in (second, third):
        stream.close()


def test_elapsed_time_covers_what_lies_between(device, gate):
    start, end = device.create_event(timing=True), device.create_event(timing=True)
    start.record(gate.stream)
    gate.close()
    end.record(gate.stream)
    start.synchronize(timeout_s=10)
    with pytest.raises(ringmem.DriverError, match="NOT_READY"):
        end.elapsed_ms(since=start)
    time.sleep(0.03)
    gate.open()
    end.synchronize(timeout_s=10)
    assert 25 <= end.elapsed_ms(since=start) < 10_000


def test_the_own_pool_keeps_its_memory_and_leaves_the_default_pool(device):
    driver, attribute = device.driver, _native.PoolAttribute.release_threshold
    before = driver.pool_get(device.ordinal, driver.pool_default(device.ordinal), attribute)
    pool = device.allocator.pool
    ptr = driver.pool_alloc_async(device.ordinal, pool, 1 << 20)
    driver.mem_free_async(device.ordinal, ptr)
    device.default_stream.synchronize(timeout_s=30)
    reserved = driver.pool_get(device.ordinal, pool, _native.PoolAttribute.reserved_current)
    assert reserved >= 1 << 20
    device.allocator.trim()
    kept = driver.pool_get(device.ordinal, pool, _native.PoolAttribute.reserved_current)
    assert kept <= reserved  # driver 580 keeps its first 32 MiB
    default = driver.pool_default(device.ordinal)
    assert driver.pool_get(device.ordinal, default, attribute) == before


def test_the_echo_is_answered_under_a_native_kernel(device):
    decision = device.memory_visibility(echo=True, timeout_s=5)
    assert decision.echo.answered is True
    assert decision.visibility is ringmem.MemoryVisibility.SYSTEM_SCOPE


@pytest.mark.parametrize("nbytes", [1, CHUNK_NBYTES, 3 * CHUNK_NBYTES + 17])
@pytest.mark.parametrize("to_device", [True, False])
def test_copies_to_and_from_a_device_of_another_driver_are_staged(device, nbytes, to_device):
    other = ringmem.simulate(capacity="256 MiB").devices[0]
    src, dst = (other, device) if to_device else (device, other)
    data = pattern(nbytes)
    source, target = Memory(src, data), Memory(dst, np.zeros(nbytes, np.uint8))
    with device.create_stream() as stream:
        result = ringmem.copy_peer(target.ptr, dst, source.ptr, src, nbytes, stream)
    assert result.route is CopyRoute.STAGED_BLOCKING
    assert np.array_equal(target.read(), data)
    source.free()
    target.free()


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_the_default_handles_are_streams(device, handle):
    ringmem.as_stream(handle, device).synchronize(timeout_s=10)


def test_a_handle_is_recognized_as_its_devices(device):
    own = device.create_stream()
    assert ringmem.as_stream(own.handle, device).device is device
    own.close()


@pytest.mark.cuda
def test_gpus_copy_to_each_other_with_and_without_peer_access():
    gpus = ringmem.devices("cuda")
    if len(gpus) < 2:
        pytest.skip("there are no two CUDA devices")
    a, b = gpus[:2]
    nbytes = 3 * CHUNK_NBYTES + 17
    data = pattern(nbytes)
    source, target = Memory(a, data), Memory(b, np.zeros(nbytes, np.uint8))
    linked = ringmem.can_access_peer(a, b)
    for enabled in (False, True)[: 1 + linked]:
        if enabled:
            ringmem.enable_peer_access(a, b)
            ringmem.enable_peer_access(a, b)
        stream = a.create_stream()
        result = ringmem.copy_peer(target.ptr, b, source.ptr, a, nbytes, stream)
        stream.synchronize(timeout_s=30)
        assert result.staged is not linked
        assert np.array_equal(target.read(), data)
    ringmem.disable_peer_access(a, b)
    ringmem.disable_peer_access(a, b)
    source.free()
    target.free()
