"""Two devices of one machine: copies over the link and through the host, kernels on peers' memory.

On the CPU and on two GPUs alike; the content is written and checked by the devices themselves.
"""

import numpy as np
import pytest

import ringmem
from ringmem.device import peer_copy
from ringmem.device.peer_copy import CopyRoute
from ringmem.device.staging import CHUNK_NBYTES

MIB = 2**20
SIZES = [8, 4096, MIB + 8, 3 * CHUNK_NBYTES + 64]


@pytest.fixture
def reach(two):
    """Peer access is on, both ways."""
    a, b = two
    for one, other in ((a, b), (b, a)):
        ringmem.enable_peer_access(one, other)
    yield two
    for one, other in ((a, b), (b, a)):
        ringmem.disable_peer_access(one, other)


def buffer_of(device, nbytes):
    made = ringmem.zeros(nbytes, "uint8", device=device)
    device.default_stream.synchronize()
    made.stream.synchronize()
    return made


def test_linked_devices_say_so_both_ways(two):
    a, b = two
    matrix = ringmem.peer_matrix(two)
    assert matrix.devices == (a, b)
    assert matrix.can_access == ((True, True), (True, True))
    assert a.uuid != b.uuid


def test_access_goes_on_and_off_and_on(two):
    a, b = two
    for _ in range(2):
        for _ in range(2):
            ringmem.enable_peer_access(a, b)
            assert ringmem.peer_access_enabled(a, b)
        for _ in range(2):
            ringmem.disable_peer_access(a, b)
            assert not ringmem.peer_access_enabled(a, b)


def test_a_kernel_reads_and_writes_a_buffer_of_the_peer(reach, kernels):
    checks = [kernels(device) for device in reach]
    for owner in (0, 1):
        with buffer_of(reach[owner], 8 * MIB) as buffer:
            for writer, reader in ((0, 1), (1, 0)):
                seed = 10 * owner + writer
                checks[writer].write(buffer.ptr, buffer.nbytes, seed)
                assert checks[reader].wrong(buffer.ptr, buffer.nbytes, seed) == 0
                assert checks[reader].wrong(buffer.ptr, buffer.nbytes, seed + 100) > 0


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("stream_of", [0, 1])
def test_copies_over_the_link_arrive_whole(reach, kernels, nbytes, stream_of):
    a, b = reach
    stream = reach[stream_of].create_stream()
    with buffer_of(a, nbytes) as src, buffer_of(b, nbytes) as dst:
        kernels(a).write(src.ptr, nbytes, nbytes)
        result = ringmem.copy_peer(dst.ptr, b, src.ptr, a, nbytes, stream)
        stream.synchronize(timeout_s=30)
        assert result.route is CopyRoute.PEER
        assert kernels(b).wrong(dst.ptr, nbytes, nbytes) == 0


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("stream_of", [0, 1])
def test_copies_through_the_host_arrive_whole(two, kernels, monkeypatch, nbytes, stream_of):
    monkeypatch.setattr(peer_copy, "can_access_peer", lambda device, peer: False)
    a, b = two
    stream = two[stream_of].create_stream()
    with buffer_of(a, nbytes) as src, buffer_of(b, nbytes) as dst:
        kernels(a).write(src.ptr, nbytes, nbytes)
        for _ in range(2):
            result = ringmem.copy_peer(dst.ptr, b, src.ptr, a, nbytes, stream)
        stream.synchronize(timeout_s=30)
        assert result.staged
        assert kernels(b).wrong(dst.ptr, nbytes, nbytes) == 0


def test_a_copy_follows_the_work_of_both_devices(two):
    a, b = two
    one, other = a.create_stream(), b.create_stream()
    data = np.random.default_rng(3).integers(0, 256, 16 * MIB, np.uint8)
    src = ringmem.empty(len(data), "uint8", device=a, stream=one)
    dst = ringmem.empty(len(data), "uint8", device=b, stream=other)
    for value in range(3):  # work is pending on both when the copy is submitted
        src.fill(value, stream=one)
        dst.fill(99, stream=other)
        dst.copy_from(src)
        assert np.all(dst.to_numpy() == value)
    src.copy_from(data)
    dst.copy_from(src)
    src.fill(0, stream=one)  # after the copy, which has not been waited for
    assert np.array_equal(dst.to_numpy(), data)
    src.close()
    dst.close()
