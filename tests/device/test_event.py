"""Events: recorded, waited for, measured between."""

import copy
import pickle
import threading
import time

import pytest

import ringmem
from ringmem.native import _native

LATENCY_S = 0.03


@pytest.fixture
def slow():
    """A device whose every task completes 30 ms late."""
    return ringmem.simulate(latency_s=LATENCY_S, capacity="64 MiB").devices[0]


def submit(device, stream):
    ptr = device.driver.mem_alloc(device.ordinal, 4096)
    device.driver.fill_async(device.ordinal, ptr, 7, 4, 1024, stream.handle)


def test_an_event_happens_behind_the_work_before_it(slow):
    stream, event = slow.create_stream(), slow.create_event()
    assert event.query() is True  # never recorded counts as having happened
    submit(slow, stream)
    event.record(stream)
    assert event.recorded
    assert event.query() is False
    event.synchronize()
    assert event.query() is True


def test_an_event_is_recorded_on_the_current_stream_by_default(slow):
    stream, event = slow.create_stream(), slow.create_event()
    submit(slow, stream)
    with stream:
        event.record()
    assert event.query() is False
    event.synchronize(timeout_s=10)


def test_synchronize_gives_up_in_time(slow):
    stream, event = slow.create_stream(), slow.create_event()
    for _ in range(20):
        submit(slow, stream)
    event.record(stream)
    with pytest.raises(ringmem.TimeoutError, match=r"event 0x\w+ of cpu:0 .* after 0.01 s"):
        event.synchronize(timeout_s=0.01)
    event.synchronize(timeout_s=30)


def test_waiting_for_an_event_releases_the_gil(slow):
    stream, event = slow.create_stream(), slow.create_event()
    for _ in range(5):
        submit(slow, stream)
    event.record(stream)
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.wait(0.005):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    event.synchronize()
    stop.set()
    thread.join()
    assert len(ticks) >= 2  # with the GIL held it would be none


def test_elapsed_time_is_that_of_the_work_between(device, gate):
    stream = gate.stream
    start, end = device.create_event(timing=True), device.create_event(timing=True)
    start.record(stream)
    gate.close()
    end.record(stream)
    start.synchronize(timeout_s=10)
    time.sleep(LATENCY_S)
    gate.open()
    end.synchronize(timeout_s=10)
    assert LATENCY_S * 1000 * 0.9 <= end.elapsed_ms(since=start) < 10_000


def test_elapsed_time_needs_timing_and_a_record(device):
    timed, untimed, unrecorded = (
        device.create_event(timing=True),
        device.create_event(),
        device.create_event(timing=True),
    )
    timed.record()
    untimed.record()
    with pytest.raises(ringmem.InvalidValueError, match=r"since: .*create_event\(timing=True\)"):
        timed.elapsed_ms(since=untimed)
    with pytest.raises(ringmem.InvalidValueError, match=r"end: .*create_event\(timing=True\)"):
        untimed.elapsed_ms(since=timed)
    with pytest.raises(ringmem.InvalidValueError, match="never recorded"):
        timed.elapsed_ms(since=unrecorded)


def test_elapsed_time_of_what_has_not_happened_says_what_to_do(slow):
    stream = slow.create_stream()
    start, end = slow.create_event(timing=True), slow.create_event(timing=True)
    start.record(stream)
    submit(slow, stream)
    end.record(stream)
    with pytest.raises(ringmem.DriverError, match="synchronize") as caught:
        end.elapsed_ms(since=start)
    assert caught.value.name == "CUDA_ERROR_NOT_READY"


def test_events_of_two_devices_have_no_time_between_them(pair):
    events = [d.create_event(timing=True) for d in pair]
    for event in events:
        event.record()
    with pytest.raises(ringmem.InvalidDeviceError, match="cpu:1"):
        events[0].elapsed_ms(since=events[1])


def test_events_of_two_drivers_have_no_time_between_them(device):
    events = [
        ringmem.Event(owner, timing=True) for owner in (device, ringmem.simulate().devices[0])
    ]
    for event in events:
        event.record()
    with pytest.raises(ringmem.InvalidDeviceError, match="they belong to two drivers"):
        events[0].elapsed_ms(since=events[1])


def test_what_makes_no_sense_for_an_event_is_refused(device):
    event = device.create_event(timing=True)
    for bad, message in (
        (lambda: event.elapsed_ms(None), "since is None: give an event"),
        (lambda: event.synchronize(timeout_s="x"), "timeout_s is 'x': give seconds"),
        (lambda: ringmem.Event(device, timing="x"), "timing is 'x': give True or False"),
        (lambda: ringmem.Event(device, blocking_sync=1), "blocking_sync is 1: give True or False"),
    ):
        with pytest.raises(ringmem.InvalidValueError, match=message):
            bad()


def test_an_event_of_another_device_cannot_be_recorded(pair):
    event = pair[0].create_event()
    with pytest.raises(ringmem.InvalidDeviceError, match="cpu:1") as caught:
        event.record(pair[1].create_stream())
    assert "cpu:0" in str(caught.value)
    with pytest.raises(ringmem.InvalidDeviceError):
        pair[1].create_stream().record(event)
    assert not event.recorded


def test_every_use_after_close_is_a_closed_error(device):
    event, other = device.create_event(timing=True), device.create_event(timing=True)
    stream = device.create_stream()
    event.record(stream)
    other.record(stream)
    event.close()
    event.close()
    for use in (
        lambda: event.handle,
        event.record,
        event.query,
        event.synchronize,
        lambda: event.synchronize(timeout_s=1),
        lambda: event.elapsed_ms(since=other),
        lambda: other.elapsed_ms(since=event),
        lambda: stream.wait(event),
        lambda: stream.record(event),
    ):
        with pytest.raises(ringmem.ClosedError, match="closed; create another"):
            use()
    assert "closed" in repr(event)


def test_close_raises_what_went_wrong_and_closes(faulty):
    event = ringmem.devices_of(faulty)[0].create_event()
    faulty.fail("event_destroy", when="after")
    with pytest.raises(ringmem.DriverError, match="cuEventDestroy"):
        event.close()
    assert event.closed
    event.close()


def test_an_event_is_neither_copied_nor_pickled(device):
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ringmem.NotSupportedError, match="<Event .*create another"):
            act(device.create_event())


def test_an_event_that_was_never_made_has_a_repr():
    class Mine(ringmem.Event):
        def __init__(self):
            """Without super().__init__()."""

    assert repr(Mine()) == "<Mine, never initialized>"


def test_an_event_closes_with_its_block_and_its_object(faulty):
    device = ringmem.devices_of(faulty)[0]
    with device.create_event() as event:
        assert faulty.live["event"] == 1
        assert "never recorded" in repr(event)
    assert faulty.live["event"] == 0
    event = device.create_event()
    del event
    assert faulty.live["event"] == 0


def test_a_finalizer_that_fails_warns_once(faulty):
    event = ringmem.devices_of(faulty)[0].create_event()
    faulty.fail("event_destroy", when="after")
    with pytest.warns(ResourceWarning, match="event 0x") as caught:
        del event
    assert len(caught) == 1


@pytest.mark.parametrize("operation", ["event_create", "event_record"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_record_that_fails_leaves_no_event(faulty, operation, when):
    stream = ringmem.devices_of(faulty)[0].create_stream()
    faulty.fail(operation, when=when)
    with pytest.raises(ringmem.DriverError):
        stream.record()
    assert faulty.live["event"] == 0


def test_errors_of_the_device_reach_whoever_asks(faulty):
    event = ringmem.devices_of(faulty)[0].create_event(timing=True)
    event.record()
    for use, operation in (
        (event.query, "event_query"),
        (event.synchronize, "event_synchronize"),
        (lambda: event.synchronize(timeout_s=5), "event_query"),
        (lambda: event.elapsed_ms(since=event), "event_elapsed"),
    ):
        faulty.fail(operation, status=_native.Status.launch_failed)
        with pytest.raises(ringmem.DriverError, match="LAUNCH_FAILED"):
            use()
