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
    for _ in range(500):
        gc.collect()
        live = {kind: count for kind, count in driver.live.items() if count}
        if not live:
            break
        time.sleep(0.002)
    return live


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
