"""A device that fails on demand, with small pages, handles and backup pieces."""

import gc
import time

import pytest

import ringmem
from ringmem import residency
from ringmem.native import _native

PAGE = 65536
SIZES = {"min_handle_nbytes": 4 * PAGE, "slot_nbytes": 2 * PAGE, "piece_nbytes": 8 * PAGE}
CONFIG = f"capacity=16MiB,granularity={PAGE}"


def live_objects(driver, but=()):
    """What is live on a FaultyDriver after the reaper had its time."""
    for attempt in range(500):
        live = {k: n for k, n in driver.live.items() if n and k not in but}
        if not live:
            break
        if attempt % 100 == 10:
            gc.collect()
        time.sleep(0.002)
    return live


@pytest.fixture
def faulty():
    driver = _native.FaultyDriver(_native.HostDriver(CONFIG))
    yield driver
    driver.clear()
    gc.collect()
    while residency.tags():
        tag = residency.tags().pop()
        if tag.state == "asleep":
            tag.wake()
        tag.close()
        del tag
    # The device's own pool lives as long as the device.
    assert live_objects(driver, but=("pool",)) == {}


@pytest.fixture
def device(faulty):
    return ringmem.devices_of(faulty)[0]
