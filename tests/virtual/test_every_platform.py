"""What must hold on the CPU device and on a GPU alike, with the content verified."""

import os
import subprocess
import sys

import numpy as np
import pytest

import ringmem
from ringmem import OutOfMemoryError
from ringmem.virtual import (
    AddressRange,
    GrowableBuffer,
    HostNode,
    PhysicalMemory,
    SparseBuffer,
    allocation_granularity,
    attach,
)

MIB = 2**20


def devices_or_skip(platform, count=1):
    found = ringmem.devices("cuda") if platform == "cuda" else ()
    if platform == "cuda" and len(found) < count:
        pytest.skip(f"there are no {count} CUDA devices")
    return found[:count]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def platform(request):
    return request.param


@pytest.fixture
def device(platform):
    """The first device of each platform; overrides the simulated one of the other tests."""
    if platform == "cuda":
        yield devices_or_skip("cuda")[0]
    else:
        with ringmem.simulate(devices=2, capacity="2 GiB") as simulation:
            yield simulation.devices[0]


@pytest.fixture
def two(platform):
    if platform == "cuda":
        yield devices_or_skip("cuda", 2)
    else:
        with ringmem.simulate(devices=2, capacity="2 GiB") as simulation:
            yield simulation.devices


def pattern(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def test_growth_and_shrink_keep_address_and_bytes(device):
    data = pattern(100 * MIB)
    with GrowableBuffer(256 * MIB, "uint8", device) as buffer:
        before = buffer.ptr
        done = 0
        for size in (1, 3 * MIB, 40 * MIB + 5, 100 * MIB):
            buffer.resize(size)
            buffer.view()[done:size].copy_from(data[done:size])
            done = size
        assert buffer.ptr == before
        assert np.array_equal(buffer.view().to_numpy(), data)
        buffer.resize(10 * MIB)
        buffer.settle()
        assert buffer.committed < 100 * MIB
        buffer.resize(90 * MIB)
        assert np.array_equal(buffer.view(10 * MIB).to_numpy(), data[: 10 * MIB])
        buffer.view()[10 * MIB :].fill(1)
        assert buffer.view().to_numpy()[-1] == 1
    assert buffer.closed


def test_memory_mapped_ahead_can_be_used(device):
    with GrowableBuffer(256 * MIB, "uint8", device) as buffer:
        buffer.reserve_ahead(64 * MIB)
        buffer.settle()
        assert buffer.committed >= 64 * MIB
        buffer.resize(30 * MIB)
        buffer.fill(7)
        buffer.resize(100 * MIB)
        assert np.all(buffer.view(30 * MIB).to_numpy() == 7)


def test_more_than_the_device_has_changes_nothing(device):
    total = device.memory_info().total
    with GrowableBuffer(2 * total, "uint8", device, shape=MIB) as buffer:
        buffer.fill(3)
        with pytest.raises(OutOfMemoryError):
            buffer.resize(total + MIB)
        assert np.all(buffer.view().to_numpy() == 3)


def test_sparse_pages_and_their_zeros(device):
    page = allocation_granularity(device)
    with SparseBuffer(16 * page, "uint8", device, read_zero=True) as buffer:
        target = np.full(16 * page, 9, np.uint8)
        whole = AddressView(device, buffer.ptr, target)
        buffer.map([1, 2, 9])
        for number in (1, 2, 9):
            buffer.view(number * page, (number + 1) * page).fill(number)
        expected = [number if number in (1, 2, 9) else 0 for number in range(16)]
        assert whole.read()[::page].tolist() == expected
        buffer.unmap([1, 9])
        buffer.settle()
        assert whole.read()[::page].tolist() == [0, 0, 2, *[0] * 13]


class AddressView:
    """Reads device memory, mapped or covered with zeros, into an array."""

    def __init__(self, device, ptr, target):
        self.device, self.ptr, self.target = device, ptr, target

    def read(self):
        self.device.driver.copy_async(
            self.device.ordinal, self.target.ctypes.data, self.ptr, self.target.nbytes, 0
        )
        self.device.default_stream.synchronize()
        return self.target


def test_one_memory_at_two_addresses(device):
    memory = PhysicalMemory.create(device, 1)
    addresses = AddressRange.reserve(device, 2 * memory.nbytes)
    first = addresses.map(memory)
    second = addresses.map(memory, memory.nbytes, access={device: "read"})
    data = pattern(memory.nbytes)
    first.view().copy_from(data)
    device.default_stream.synchronize()
    assert np.array_equal(second.view().to_numpy(), data)
    assert second.get_access(device) == "read"
    first.unmap()
    assert np.array_equal(second.view().to_numpy(), data)
    second.unmap()
    memory.close()
    addresses.close()


def test_memory_of_the_host_serves_the_device(device):
    try:
        memory = PhysicalMemory.create(HostNode(0, device), 1, shareable=False)
    except ringmem.NotSupportedError:
        pytest.skip("no virtual memory on host nodes here")
    with memory:
        mapping = AddressRange.reserve(device, memory.nbytes).map(memory)
        view = mapping.view(1000)
        view.fill(4)
        assert np.all(view.to_numpy() == 4)
        del view
        mapping.unmap()


def test_a_peer_reads_and_writes_where_it_is_let(two):
    mine, other = two
    if not ringmem.can_access_peer(other, mine):
        pytest.skip("the devices cannot reach each other")
    with GrowableBuffer(64 * MIB, "uint8", mine, shape=8 * MIB) as buffer:
        buffer.set_access({other: "readwrite"})
        buffer.resize(40 * MIB)
        other.driver.fill_async(other.ordinal, buffer.ptr, 6, 1, buffer.nbytes, 0)
        other.default_stream.synchronize()
        assert np.all(buffer.view().to_numpy() == 6)


ATTACH = """
import pickle, sys
import numpy as np
from ringmem.virtual import attach
with attach(pickle.load(sys.stdin.buffer)) as shared:
    assert np.all(shared.view().to_numpy() == 7)
    shared.view()[:100].fill(8)
    shared.device.default_stream.synchronize()
"""


def test_another_process_sees_and_writes_the_same_memory(platform):
    # Tickets name devices that both processes have: the default ones, not simulated here.
    import pickle

    device = devices_or_skip("cuda")[0] if platform == "cuda" else ringmem.Device("cpu")
    with GrowableBuffer(256 * MIB, "uint8", device, shape=70 * MIB) as buffer:
        buffer.fill(7)
        device.default_stream.synchronize()
        subprocess.run(
            [sys.executable, "-c", ATTACH],
            input=pickle.dumps(buffer.share()),
            check=True,
            timeout=100,
        )
        array = buffer.view().to_numpy()
        assert np.all(array[:100] == 8)
        assert np.all(array[100:] == 7)
        ticket = buffer.share()
        with attach(ticket, device) as here:
            assert np.array_equal(here.view().to_numpy(), array)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_on_a_gpu_too_either_side_may_be_killed():
    devices_or_skip("cuda")
    script = os.path.join(os.path.dirname(__file__), "sigkill_rounds.py")
    rounds = os.environ.get("RINGMEM_SIGKILL_ROUNDS", "20")
    subprocess.run([sys.executable, script, rounds, "cuda:0"], check=True, timeout=480)


@pytest.mark.cuda
def test_mapping_does_not_spoil_a_capture_on_another_stream():
    device = devices_or_skip("cuda")[0]
    cuda = pytest.importorskip("cuda.bindings.runtime")
    stream = device.create_stream()
    with (
        GrowableBuffer(256 * MIB, "uint8", device, shape=4 * MIB) as captured,
        GrowableBuffer(256 * MIB, "uint8", device) as buffer,
        SparseBuffer(256 * MIB, "uint8", device) as sparse,
    ):
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal
        assert cuda.cudaStreamBeginCapture(stream.handle, mode)[0] == 0
        assert cuda.cudaMemsetAsync(captured.ptr, 5, captured.nbytes, stream.handle)[0] == 0
        other = device.create_stream()
        buffer.resize(100 * MIB)
        buffer.reserve_ahead(64 * MIB)
        buffer.resize(10 * MIB, streams=other)
        buffer.settle()
        sparse.map(range(8))
        sparse.unmap(range(4), streams=other)
        sparse.settle()
        error, graph = cuda.cudaStreamEndCapture(stream.handle)
        assert error == 0
        error, executable = cuda.cudaGraphInstantiate(graph, 0)
        assert error == 0
        assert cuda.cudaGraphLaunch(executable, stream.handle)[0] == 0
        stream.synchronize()
        assert np.all(captured.view().to_numpy() == 5)
        cuda.cudaGraphExecDestroy(executable)
        cuda.cudaGraphDestroy(graph)
