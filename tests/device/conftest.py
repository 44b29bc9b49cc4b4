"""Simulated devices, and a driver that fails on demand, for the tests of floor 1."""

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
