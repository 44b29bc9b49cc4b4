"""Simulated devices with a small page, and a driver that fails on demand, for virtual memory."""

import gc
import time

import pytest

import ringmem
from ringmem.native import _native
from ringmem.virtual import recycle_limit, set_recycle_limit

PAGE = 65536
CONFIG = f"devices=2,capacity=64MiB,granularity={PAGE}"


@pytest.fixture(autouse=True)
def no_recycling():
    """Handles go back to the driver at once, so that counts are exact."""
    before = recycle_limit()
    set_recycle_limit(0)
    yield
    set_recycle_limit(before)


@pytest.fixture
def page():
    return PAGE


def live_objects(driver):
    """What is live on a FaultyDriver, after the mapping thread had time to let go of things."""
    for attempt in range(500):
        live = {kind: count for kind, count in driver.live.items() if count}
        if not live:
            break
        if attempt % 100 == 10:
            gc.collect()
        time.sleep(0.002)
    return live


def fill_now(device, ptr, nbytes, value=1):
    """Fill on the default stream and wait, so that a fault is raised here."""
    device.driver.fill_async(device.ordinal, ptr, value, 1, nbytes, 0)
    device.synchronize()


@pytest.fixture
def faulty():
    """A FaultyDriver around two simulated devices; nothing may be live on it afterwards."""
    driver = _native.FaultyDriver(_native.HostDriver(CONFIG))
    yield driver
    driver.clear()
    assert live_objects(driver) == {}


@pytest.fixture
def pair(faulty):
    return ringmem.devices_of(faulty)


@pytest.fixture
def device(pair):
    return pair[0]
