"""Sleep and wake on the CPU device and on a GPU alike, with the content verified."""

import contextlib

import numpy as np
import pytest

import ringmem
from ringmem import OutOfMemoryError, residency

MIB = 2**20


def cuda_or_skip():
    found = ringmem.devices("cuda")
    if not found:
        pytest.skip("there is no CUDA device")
    return found[0]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda":
        yield cuda_or_skip()
    else:
        with ringmem.simulate(capacity="1 GiB") as simulation:
            yield simulation.devices[0]


@pytest.fixture
def tag(device):
    made = residency.tag("platform", "host", device, piece_nbytes=64 * MIB)
    yield made
    if made.state == "asleep":
        made.wake()
    made.close()


def test_bytes_and_addresses_come_back(device, tag):
    data = [np.random.default_rng(n).integers(0, 256, n, np.uint8) for n in (5, MIB + 3, 90 * MIB)]
    with tag:
        buffers = [ringmem.from_array(x, device=device) for x in data]
    addresses = [buffer.ptr for buffer in buffers]
    free = device.memory_info().free
    for _ in range(2):
        tag.sleep()
        assert device.memory_info().free >= free + 90 * MIB
        tag.wake()
        assert [buffer.ptr for buffer in buffers] == addresses
        for buffer, expected in zip(buffers, data, strict=True):
            assert np.array_equal(buffer.to_numpy(), expected)
    for buffer in buffers:
        buffer.close()


def test_waking_into_a_full_device_keeps_the_backup(device, tag):
    with tag:
        buffer = ringmem.from_array(np.arange(40 * MIB, dtype=np.uint8), device=device)
    tag.sleep()
    from ringmem.virtual import PhysicalMemory

    with contextlib.ExitStack() as filling:
        nbytes = device.memory_info().free // (2 * MIB) * (2 * MIB)
        while nbytes >= 2 * MIB:
            try:
                filling.enter_context(PhysicalMemory.create(device, nbytes))
            except OutOfMemoryError:
                nbytes = nbytes // 2 // (2 * MIB) * (2 * MIB)
        with pytest.raises(OutOfMemoryError, match="missing"):
            tag.wake()
        assert tag.state == "asleep"
    tag.wake()
    assert np.array_equal(buffer.to_numpy(), np.arange(40 * MIB, dtype=np.uint8))
    buffer.close()


@pytest.mark.cuda
def test_a_graph_replays_after_sleep_and_wake():
    device = cuda_or_skip()
    cuda = pytest.importorskip("cuda.bindings.runtime")
    tag = residency.tag("graph", "host", device)
    with tag:
        buffer = ringmem.zeros(8 * MIB, "uint8", device=device)
    device.default_stream.synchronize()
    stream = device.create_stream()
    mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    assert cuda.cudaStreamBeginCapture(stream.handle, mode)[0] == 0
    assert cuda.cudaMemsetAsync(buffer.ptr, 5, buffer.nbytes // 2, stream.handle)[0] == 0
    error, graph = cuda.cudaStreamEndCapture(stream.handle)
    assert error == 0
    error, executable = cuda.cudaGraphInstantiate(graph, 0)
    assert error == 0
    tag.sleep()
    tag.wake()
    assert not buffer.to_numpy().any()
    assert cuda.cudaGraphLaunch(executable, stream.handle)[0] == 0
    stream.synchronize()
    array = buffer.to_numpy()
    assert np.all(array[: 4 * MIB] == 5)
    assert not array[4 * MIB :].any()
    cuda.cudaGraphExecDestroy(executable)
    cuda.cudaGraphDestroy(graph)
    buffer.close()
    tag.close()
