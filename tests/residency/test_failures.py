"""Every driver call of a sleep and a wake fails once, before or after it was done."""

import numpy as np
import pytest

import ringmem
from ringmem import DriverError, OutOfMemoryError, residency
from ringmem.native import _native

from .conftest import CONFIG, PAGE, SIZES, live_objects

DATA = np.random.default_rng(0).integers(0, 256, 11 * PAGE + 77, np.uint8)


def attempt(operation):
    """Run something that may fail; return whether it did."""
    try:
        operation()
    except DriverError as error:
        error.with_traceback(None)
        return True
    return False


def until_done(operation):
    for _ in range(5):
        if not attempt(operation):
            return
    raise AssertionError("it failed again and again")


def cycle(driver, device, backup, nth, when):
    """Sleep and wake while the nth call fails; return whether it came to that."""
    tag = residency.tag("sweep", backup, device, **SIZES)
    # A handle that wake maps before it copies; that of the buffer comes beside the copies.
    first = ringmem.empty(17 * PAGE, "uint8", device=device, allocator=tag)
    first.fill(7)
    buffer = ringmem.empty(len(DATA), "uint8", device=device, allocator=tag)
    buffer.copy_from(DATA)
    device.synchronize()
    at = buffer.ptr
    driver.fail("*", nth=nth, when=when)
    failed = attempt(tag.sleep)
    assert tag.state in ("awake", "asleep")
    if tag.state == "awake":  # the old state
        assert failed
        assert backup != "host" or np.array_equal(buffer.to_numpy(), DATA)
        until_done(tag.sleep)
    assert tag.state == "asleep"
    if attempt(tag.wake) and tag.state == "asleep":
        until_done(tag.wake)
    assert tag.state == "awake"
    assert buffer.ptr == at
    reached = driver.pending == 0
    driver.clear()
    if backup == "host":
        assert np.array_equal(buffer.to_numpy(), DATA)
        assert np.all(first.to_numpy() == 7)
    buffer.fill(1)
    device.synchronize()
    first.close()
    buffer.close()
    tag.close()
    return reached


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("backup", ["host", "discard"])
def test_whatever_call_fails_the_state_is_the_old_or_the_new(backup, when):
    reached, nth = True, 0
    while reached:
        nth += 1
        driver = _native.FaultyDriver(_native.HostDriver(CONFIG))
        device = ringmem.devices_of(driver)[0]
        reached = cycle(driver, device, backup, nth, when)
        # The device's own pool lives as long as the device.
        assert live_objects(driver, but=("pool",)) == {}, f"call {nth} fails {when}"
    assert nth > 8


def life(device):
    """Everything that a tag does beside sleep and wake, and these; all is closed in the end."""
    made, kept = [], []
    try:
        made.append(tag := residency.tag("life", "host", device, **SIZES))
        kept += [ringmem.empty(n * PAGE, "uint8", device=device, allocator=tag) for n in (9, 5, 2)]
        kept[1].fill(3)
        kept.pop(0).close()
        kept.append(ringmem.empty(4 * PAGE, "uint8", device=device, allocator=tag))
        kept.pop(1).close()  # pending while the tag sleeps
        tag.sleep()
        tag.wake()
        tag.drop_backup()
        tag.trim()
        tag.sleep()
        kept.pop().close()
        tag.wake()
        assert np.all(kept[0].to_numpy() == 3)
    finally:
        for tag in made:
            if tag.state == "asleep":
                until_done(tag.wake)
            while kept:
                until_done(kept.pop().close)
            until_done(tag.close)


@pytest.mark.parametrize("when", ["before", "after"])
def test_whatever_call_of_a_life_fails_nothing_is_lost(when):
    nth, unused = 0, False
    while not unused:
        nth += 1
        driver = _native.FaultyDriver(_native.HostDriver(CONFIG))
        device = ringmem.devices_of(driver)[0]
        device.default_stream.synchronize()
        driver.fail("*", nth=nth, when=when)
        try:
            life(device)
        except DriverError as error:
            error.with_traceback(None)
        else:
            unused = driver.pending > 0
        driver.clear()
        assert residency.tags(device) == []
        assert live_objects(driver, but=("pool",)) == {}, f"call {nth} fails {when}"
    assert nth > 30


def test_a_backup_that_cannot_be_pinned_leaves_everything_awake():
    driver = _native.FaultyDriver(_native.HostDriver(CONFIG))
    device = ringmem.devices_of(driver)[0]
    tag = residency.tag("unpinned", "host", device, **SIZES)
    buffer = ringmem.empty(len(DATA), "uint8", device=device, allocator=tag)
    buffer.copy_from(DATA)
    driver.fail("host_register", nth=2, status=_native.Status.out_of_memory)
    with pytest.raises(OutOfMemoryError, match="backup"):
        tag.sleep()
    assert tag.state == "awake"
    assert np.array_equal(buffer.to_numpy(), DATA)
    tag.sleep()
    tag.wake()
    buffer.close()
    tag.close()
