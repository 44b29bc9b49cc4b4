"""A driver that was used before a fork refuses the child, and says why and what would do."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys, ringmem
from ringmem.native import _native

device = ringmem.Device("cpu")
simulated = ringmem.simulate().devices[0]
buffer = ringmem.zeros(64, "u1", device=device)
stream, event = device.create_stream(), device.create_event()
pool, pinned = ringmem.Pool(device), ringmem.PinnedPool(device)
uses = [
    lambda: ringmem.empty(3, device=device),
    lambda: ringmem.PinnedBuffer(3, device=device),
    lambda: ringmem.empty(3),
    lambda: ringmem.PhysicalMemory.create(device, 100),
    lambda: ringmem.Device("cpu:1"),
    lambda: buffer.fill(0),
    lambda: buffer.to_numpy(),
    lambda: ringmem.copy_peer(buffer.ptr + 9, device, buffer.ptr, device, 9),
    lambda: stream.synchronize(timeout_s=1),
    lambda: event.record(stream),
    lambda: device.create_stream(),
    lambda: device.memory_info(),
    lambda: device.synchronize(),
    lambda: simulated.memory_info(),
    lambda: pool.allocate(100),
    lambda: pinned.allocate(100),
]
reader, writer = os.pipe()
if os.fork() == 0:
    for use in uses:
        try:
            use()
            text = "no error"
        except ringmem.NotInitializedError as error:
            text = str(error)
        except Exception as error:
            text = repr(error)
        os.write(writer, (text.replace("\\n", " ") + "\\n").encode())
    try:
        ringmem.Device("cuda")
    except ringmem.NotInitializedError as error:
        os.write(writer, f"missing: {error}\\n".encode())
    os.write(writer, f"new: {ringmem.simulate().devices[0].memory_info().free > 0}\\n".encode())
    os._exit(0)
os.close(writer)
os.wait()
print(open(reader).read(), end="")
"""


@pytest.fixture(scope="module")
def said():
    """What each use of the parent's objects said in the child, then of a missing CUDA driver."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        env={
            **os.environ,
            "RINGMEM_SIMULATE": "",
            "RINGMEM_DEVICE": "cpu",
            "RINGMEM_CUDA_LIBRARY": "/nowhere/libcuda.so.1",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_whatever_a_child_does_with_the_parents_driver_says_to_spawn(said):
    *uses, _, _ = said
    assert len(uses) == CODE.count("    lambda: ")
    for text in uses:
        assert text.count("this process was forked from one that used the driver") == 1
        assert "start it with the 'spawn' or 'forkserver' method" in text
        assert "no usable driver" not in text
        assert "NVIDIA" not in text


def test_a_driver_that_is_missing_in_the_child_is_not_blamed_on_the_fork(said):
    missing = said[-2]
    assert missing.startswith("missing: 'cuda' needs a CUDA driver:")
    assert "there is no usable driver" in missing
    assert "/nowhere/libcuda.so.1" in missing
    assert "forked" not in missing


def test_a_driver_of_the_childs_own_works(said):
    assert said[-1] == "new: True"
