"""Virtual memory of two devices: access for both, in one call; other processes on the peer.

On the CPU and on two GPUs alike; the content is written and checked by the devices themselves.
"""

import os
import subprocess
import sys

import numpy as np
import pytest

import ringmem
from ringmem.native import _native
from ringmem.virtual import AddressRange, GrowableBuffer, PhysicalMemory, SparseBuffer, attach

MIB = 2**20
WAYS = [(0, 1), (1, 0), (1, 1), (0, 0)]  # who writes, who reads


@pytest.fixture
def counted(two):
    """The same devices through a driver that counts its calls."""
    return ringmem.devices_of(_native.FaultyDriver(two[0].driver))


def check_all_ways(checks, ptr, nbytes):
    for seed, (writer, reader) in enumerate(WAYS):
        checks[writer].write(ptr, nbytes, seed)
        assert checks[reader].wrong(ptr, nbytes, seed) == 0


@pytest.mark.parametrize("home", [0, 1])
def test_access_for_both_is_one_call_and_both_kernels_use_it(counted, kernels, home):
    driver = counted[0].driver
    memory = PhysicalMemory.create(counted[home], 8 * MIB)
    addresses = AddressRange.reserve(counted[0], memory.nbytes)
    mapping = addresses.map(memory, access={counted[home]: "read"})
    calls = driver.calls["mem_set_access"]
    mapping.set_access(dict.fromkeys(counted, "readwrite"))
    assert driver.calls["mem_set_access"] == calls + 1
    assert [mapping.get_access(device) for device in counted] == ["readwrite"] * 2
    check_all_ways([kernels(device) for device in counted], mapping.ptr, memory.nbytes)
    mapping.set_access({counted[0]: "read"})
    assert [mapping.get_access(device) for device in counted] == ["read", "readwrite"]
    mapping.unmap()
    memory.close()
    addresses.close()


def test_access_for_both_is_granted_while_mapping(two, kernels):
    memory = PhysicalMemory.create(two[0], 4 * MIB)
    addresses = AddressRange.reserve(two[0], memory.nbytes)
    mapping = addresses.map(memory, access=dict.fromkeys(two, "readwrite"))
    check_all_ways([kernels(device) for device in two], mapping.ptr, memory.nbytes)
    mapping.unmap()
    memory.close()
    addresses.close()


def test_what_grows_later_is_the_peers_too(two, kernels):
    checks = [kernels(device) for device in two]
    with GrowableBuffer(256 * MIB, device=two[0], shape=4 * MIB) as buffer:
        buffer.set_access({two[1]: "readwrite"})
        check_all_ways(checks, buffer.ptr, buffer.nbytes)
        checks[1].write(buffer.ptr, buffer.nbytes, 7)
        buffer.resize(100 * MIB)
        assert checks[0].wrong(buffer.ptr, 4 * MIB, 7) == 0  # growth moved nothing
        check_all_ways(checks, buffer.ptr, buffer.nbytes)
        buffer.resize(2 * MIB, streams=[check.stream for check in checks])
        buffer.settle()
        buffer.resize(60 * MIB)
        check_all_ways(checks, buffer.ptr, buffer.nbytes)


def test_a_peers_memory_is_copied_from_and_to(two, kernels):
    checks = [kernels(device) for device in two]
    both = dict.fromkeys(two, "readwrite")
    with (
        GrowableBuffer(64 * MIB, device=two[0], access=both, shape=20 * MIB) as mine,
        GrowableBuffer(64 * MIB, device=two[1], access=both, shape=20 * MIB) as theirs,
    ):
        checks[0].write(mine.ptr, mine.nbytes, 1)
        theirs.view().copy_from(mine.view())
        two[1].default_stream.synchronize()
        assert checks[1].wrong(theirs.ptr, theirs.nbytes, 1) == 0
        checks[1].write(theirs.ptr, theirs.nbytes, 2)
        mine.view().copy_from(theirs.view())
        two[0].default_stream.synchronize()
        assert checks[0].wrong(mine.ptr, mine.nbytes, 2) == 0


def test_pages_of_a_sparse_buffer_live_on_its_device(two):
    """A device other than the first is as good; nothing is taken from the first."""
    before = two[0].memory_info().free
    with SparseBuffer(64 * MIB, "uint8", two[1]) as buffer:
        buffer.map(range(16))
        assert two[0].memory_info().free >= before - 8 * MIB  # others use it meanwhile
        rows = buffer.view(0, 16 * buffer.page_nbytes)
        rows.fill(5)
        assert np.all(rows.to_numpy() == 5)
        del rows


def test_a_ticket_is_attached_for_the_peer(two, kernels):
    checks = [kernels(device) for device in two]
    with GrowableBuffer(64 * MIB, device=two[0], shape=20 * MIB) as buffer:
        checks[0].write(buffer.ptr, buffer.nbytes, 1)
        with attach(buffer.share(), two[1]) as shared:
            assert shared.device is two[1]
            assert checks[1].wrong(shared.ptr, shared.nbytes, 1) == 0
            checks[1].write(shared.ptr, shared.nbytes, 2)
        assert checks[0].wrong(buffer.ptr, buffer.nbytes, 2) == 0


CHILD = """
import importlib.util, pickle, sys
import ringmem
from ringmem.virtual import attach
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
device = ringmem.Device(sys.argv[2])
check = module.Kernels(device)
with attach(pickle.load(sys.stdin.buffer), device) as shared:
    assert check.wrong(shared.ptr, shared.nbytes, 1) == 0
    check.write(shared.ptr, shared.nbytes, 2)
print("right")
"""

OWNER = """
import importlib.util, pickle, subprocess, sys
import ringmem
from ringmem.virtual import GrowableBuffer
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
mine, peer = ringmem.devices(sys.argv[3])[:2]
check = module.Kernels(mine)
with GrowableBuffer(64 << 20, device=mine, shape=20 << 20) as buffer:
    check.write(buffer.ptr, buffer.nbytes, 1)
    child = subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1], peer.name],
                           input=pickle.dumps(buffer.share()), capture_output=True, timeout=60)
    assert child.returncode == 0, child.stderr.decode()
    assert check.wrong(buffer.ptr, buffer.nbytes, 2) == 0
print(child.stdout.decode())
"""


def test_another_process_attaches_on_the_peer(platform, request, kernels):
    if platform == "cuda":
        request.getfixturevalue("two")
    environment = {**os.environ, "RINGMEM_SIMULATE": "devices=2,capacity=1GiB"}
    file = kernels.__init__.__code__.co_filename
    result = subprocess.run(
        [sys.executable, "-c", OWNER, file, CHILD, platform],
        capture_output=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert b"right" in result.stdout
