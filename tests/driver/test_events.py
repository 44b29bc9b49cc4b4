"""Events: completion, waits between streams, and times."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from ringmem.native import _native as native

if TYPE_CHECKING:
    from tests.driver.conftest import Kit

Status = native.Status
pytestmark = pytest.mark.timeout(60, method="thread")


def test_an_event_that_was_not_recorded_is_complete(kit: Kit) -> None:
    event, stream = kit.event(), kit.stream()
    assert kit.driver.event_query(0, event) is True
    kit.driver.event_synchronize(0, event)
    kit.driver.stream_wait_event(0, stream, event)
    kit.driver.stream_synchronize(0, stream)


def test_an_event_completes_with_the_work_before_it(kit: Kit) -> None:
    stream, event, memory = kit.stream(), kit.event(), kit.pinned(64)
    gate = kit.gate(stream)
    kit.fill(memory.device_ptr, 1, 64, stream)
    kit.driver.event_record(0, event, stream)
    assert kit.driver.event_query(0, event) is False
    gate.open()
    kit.driver.event_synchronize(0, event)
    assert kit.driver.event_query(0, event) is True
    assert (memory.data == 1).all()


def test_an_event_does_not_wait_for_work_after_it(kit: Kit) -> None:
    stream, event = kit.stream(), kit.event()
    kit.driver.event_record(0, event, stream)
    gate = kit.gate(stream)
    kit.driver.event_synchronize(0, event)
    assert not kit.driver.stream_query(0, stream)
    gate.open()


@pytest.mark.parametrize("blocking_sync", [False, True])
def test_synchronizing_with_an_event_gives_up_the_gil(kit: Kit, blocking_sync: bool) -> None:
    stream, event = kit.stream(), kit.event(blocking_sync=blocking_sync)
    gate = kit.gate(stream)
    kit.driver.event_record(0, event, stream)
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    kit.driver.event_synchronize(0, event)
    opener.join()


def test_a_stream_waits_for_an_event_of_another(kit: Kit) -> None:
    first, second, event = kit.stream(), kit.stream(), kit.event()
    ptr, copy = kit.alloc(4096), kit.pinned(4096)
    gate = kit.gate(first)
    kit.fill(ptr, 1, 4096, first)
    kit.driver.event_record(0, event, first)
    kit.driver.stream_wait_event(0, second, event)
    kit.driver.copy_async(0, copy.ptr, ptr, 4096, second)
    time.sleep(0.01)
    assert not kit.driver.stream_query(0, second)
    gate.open()
    kit.driver.stream_synchronize(0, second)
    assert (copy.data == 1).all()


def test_a_wait_is_for_the_recording_before_it(kit: Kit) -> None:
    first, second, event = kit.stream(), kit.stream(), kit.event()
    kit.driver.event_record(0, event, first)
    kit.driver.stream_wait_event(0, second, event)
    gate = kit.gate(first)
    kit.driver.event_record(0, event, first)  # later: not what `second` waits for
    kit.driver.stream_synchronize(0, second)
    assert not kit.driver.event_query(0, event)
    gate.open()
    kit.driver.event_synchronize(0, event)


def test_a_destroyed_event_still_guards_what_waits_for_it(kit: Kit) -> None:
    first, second = kit.stream(), kit.stream()
    event = kit.driver.event_create(0)
    gate = kit.gate(first)
    kit.driver.event_record(0, event, first)
    kit.driver.stream_wait_event(0, second, event)
    kit.driver.event_destroy(0, event)
    time.sleep(0.01)
    assert not kit.driver.stream_query(0, second)
    gate.open()
    kit.driver.stream_synchronize(0, second)


def test_a_destroyed_event_is_an_invalid_handle(host: Kit) -> None:
    event = host.driver.event_create(0)
    host.driver.event_destroy(0, event)
    for call in (
        lambda: host.driver.event_destroy(0, event),
        lambda: host.driver.event_query(0, event),
        lambda: host.driver.event_record(0, event),
        lambda: host.driver.event_synchronize(0, event),
        lambda: host.driver.stream_wait_event(0, 0, event),
    ):
        with host.refused(Status.invalid_handle):
            call()


def test_a_stream_waits_for_an_event_of_another_device(kit: Kit) -> None:
    if kit.driver.device_count() < 2:
        pytest.skip("needs two devices")
    here, there = kit.stream(device=0), kit.stream(device=1)
    event = kit.event(device=0)
    gate = kit.gate(here)
    kit.driver.event_record(0, event, here)
    kit.driver.stream_wait_event(1, there, event)
    assert not kit.driver.stream_query(1, there)
    gate.open()
    kit.driver.stream_synchronize(1, there)


# --- elapsed time --------------------------------------------------------------------------------


def test_the_time_between_two_events(kit: Kit) -> None:
    stream = kit.stream()
    start, end = kit.event(timing=True), kit.event(timing=True)
    kit.driver.event_record(0, start, stream)
    kit.driver.event_synchronize(0, start)
    gate = kit.gate(stream)
    kit.driver.event_record(0, end, stream)
    began = time.perf_counter()
    time.sleep(0.05)
    gate.open()
    kit.driver.event_synchronize(0, end)
    took_ms = (time.perf_counter() - began) * 1e3
    elapsed = kit.driver.event_elapsed(0, start, end)
    assert 45 <= elapsed <= took_ms + 1000


def test_the_time_to_a_pending_event_is_not_ready(kit: Kit) -> None:
    stream = kit.stream()
    start, end = kit.event(timing=True), kit.event(timing=True)
    kit.driver.event_record(0, start, stream)
    gate = kit.gate(stream)
    kit.driver.event_record(0, end, stream)
    with kit.refused(Status.not_ready):
        kit.driver.event_elapsed(0, start, end)
    gate.open()


def test_events_without_timing_or_a_recording_have_no_time(kit: Kit) -> None:
    timed, plain, unrecorded = kit.event(timing=True), kit.event(), kit.event(timing=True)
    kit.driver.event_record(0, timed)
    kit.driver.event_record(0, plain)
    kit.driver.synchronize(0)
    for start, end in ((plain, timed), (timed, plain), (timed, unrecorded)):
        with kit.refused(Status.invalid_handle):
            kit.driver.event_elapsed(0, start, end)
