"""Simulated devices of 2 MiB pages, one that fails on demand, and whatever GPU there is."""

import gc

import pytest

import ringmem
from ringmem.native import _native

MIB = 1 << 20


@pytest.fixture
def device():
    with ringmem.simulate(devices=2, capacity="512 MiB") as simulation:
        yield simulation.devices[0]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def any_device(request):
    """A simulated device, and a GPU where there is one."""
    if request.param == "cpu":
        with ringmem.simulate(capacity="512 MiB") as simulation:
            yield simulation.devices[0]
        return
    if not ringmem.devices("cuda"):
        pytest.skip("no CUDA device")
    yield ringmem.Device("cuda:0")


def settle(driver):
    """What is live on a FaultyDriver once the reaper has done its work."""
    gc.collect()
    _native.flush_reaper(10.0)
    return {kind: count for kind, count in driver.live.items() if count}


@pytest.fixture
def faulty():
    """A FaultyDriver around a simulated device; nothing may be live on it afterwards."""
    driver = _native.FaultyDriver(_native.HostDriver("devices=1,capacity=256MiB"))
    yield driver
    driver.clear()
    assert settle(driver) == {}
