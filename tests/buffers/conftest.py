"""Simulated devices, a driver that fails on demand, and a check that nothing is left behind."""

import gc

import pytest

import ringmem
from ringmem.native import _native


@pytest.fixture
def device():
    with ringmem.simulate(devices=2, capacity="256 MiB") as simulation:
        yield simulation.devices[0]


@pytest.fixture
def other(device):
    return ringmem.Device("cpu:1")


@pytest.fixture
def slow():
    """A device whose asynchronous work completes 50 ms late."""
    with ringmem.simulate(capacity="256 MiB", latency_s=0.05) as simulation:
        yield simulation.devices[0]


@pytest.fixture
def gpu_like():
    """A device that hides its memory from the host."""
    with ringmem.simulate(capacity="256 MiB", strict=True) as simulation:
        yield simulation.devices[0]


@pytest.fixture(scope="session")
def live_objects():
    """Return a function that counts what a FaultyDriver gave out and did not get back."""

    def count(driver):
        gc.collect()
        assert _native.flush_reaper(10)
        return {kind: count for kind, count in driver.live.items() if count}

    return count


@pytest.fixture
def faulty(live_objects):
    driver = _native.FaultyDriver(_native.HostDriver("devices=2,capacity=256MiB"))
    yield driver
    driver.clear()
    # The pool behind the allocations goes with its device, which a test may still hold.
    assert {kind: n for kind, n in live_objects(driver).items() if kind != "pool"} == {}
