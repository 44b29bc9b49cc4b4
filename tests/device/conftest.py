"""Simulated devices, and a driver that fails on demand, for the tests of floor 1."""

import ctypes
import gc

import pytest

import ringmem
from ringmem.native import _native


@pytest.fixture
def pair():
    """Two simulated devices that reach each other, found as cpu:0 and cpu:1."""
    with ringmem.simulate(devices=2, capacity="256 MiB") as simulation:
        yield simulation.devices


@pytest.fixture
def device(pair):
    return pair[0]


@pytest.fixture
def faulty():
    """A FaultyDriver around two simulated devices; nothing may be live on it afterwards."""
    driver = _native.FaultyDriver(_native.HostDriver("devices=2,capacity=256MiB"))
    yield driver
    driver.clear()
    gc.collect()
    assert {kind: count for kind, count in driver.live.items() if count} == {}


class Gate:
    """A stream, and a word of pinned memory that it can be made to wait for."""

    def __init__(self, device):
        self.stream = device.create_stream()
        self._device = device
        ptr = device.driver.host_alloc(device.ordinal, 4096)
        self._word = ctypes.c_uint32.from_address(ptr)
        self._word.value = 0
        self._ptr = device.driver.host_device_pointer(device.ordinal, ptr)

    def close(self):
        """Let work that is submitted from now on wait."""
        self._device.driver.stream_wait_value(
            self._device.ordinal, self.stream.handle, self._ptr, 1
        )

    def open(self):
        """Let it go on."""
        self._word.value = 1


@pytest.fixture
def gate(device):
    """A gate of cpu:0, open."""
    gate = Gate(device)
    yield gate
    gate.open()
    if not gate.stream.closed:
        gate.stream.synchronize(timeout_s=10)


@pytest.fixture
def blocked(gate):
    """A gate of cpu:0 with work waiting at it."""
    gate.close()
    return gate
