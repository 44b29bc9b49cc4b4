"""Streams: own, default, and those of other libraries."""

import copy
import gc
import pickle
import signal
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import ringmem
from ringmem import as_stream, current_stream
from ringmem.native import _native

# --- own streams -------------------------------------------------------------------------------


def test_an_own_stream_is_created_and_destroyed(faulty):
    device = ringmem.devices_of(faulty)[0]
    stream = device.create_stream(priority=-1, non_blocking=False)
    assert stream.owned
    assert stream.handle > 2
    assert stream.__cuda_stream__() == (0, stream.handle)
    assert faulty.live["stream"] == 1
    stream.close()
    stream.close()
    assert stream.closed
    assert faulty.live["stream"] == 0


def test_streams_and_events_are_constructed_like_any_object():
    ours = ringmem.default_device()
    with ringmem.Stream() as stream, ringmem.Event(timing=True) as event:
        assert stream.device is ours
        assert event.device is ours
        assert stream.owned
        assert current_stream(ours) is stream
        event.record()
    named = ringmem.Stream(ours.name, priority=-1, non_blocking=False)
    assert named.device is ours
    for kind in (ringmem.Stream, ringmem.Event):
        with pytest.raises(ringmem.InvalidDeviceError, match="'cpu:99'"):
            kind("cpu:99")


@pytest.mark.parametrize("priority", [1 << 31, -(1 << 40), 1 << 80, np.int64(-1)])
def test_any_integer_is_a_priority(device, priority):
    for make in (
        ringmem.Stream(device, priority=priority),
        device.create_stream(priority=priority),
    ):
        assert make.query()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"priority": 1.5}, "priority is 1.5: give an integer"),
        ({"priority": None}, "priority is None: give an integer"),
        ({"non_blocking": "x"}, "non_blocking is 'x': give True or False"),
    ],
)
def test_what_is_no_option_of_a_stream_is_refused(device, arguments, message):
    with pytest.raises(ringmem.InvalidValueError, match=message):
        ringmem.Stream(device, **arguments)


def test_only_an_event_is_recorded(device):
    stream = device.create_stream()
    with pytest.raises(ringmem.InvalidValueError, match="event is 'x': give an Event of cpu:0"):
        stream.record("x")


def test_a_name_will_do_for_the_device_of_a_stream(pair):
    stream = pair[1].create_stream()
    assert as_stream(None, "cpu:1") is pair[1].default_stream
    with stream:
        assert as_stream(None, "cpu:1") is stream
    assert as_stream(stream, "cpu:1") is stream
    assert as_stream(stream.handle, "cpu:1").device is pair[1]
    with pytest.raises(ringmem.InvalidDeviceError, match="belongs to cpu:1.*work is for cpu:0"):
        as_stream(stream, "cpu:0")
    for names_no_stream in (None, stream, 0):
        with pytest.raises(ringmem.InvalidValueError, match="device is 3"):
            as_stream(names_no_stream, 3)


def test_devices_of_one_name_and_two_drivers_are_told_apart(device):
    stream = ringmem.simulate().devices[0].create_stream()
    for use in (as_stream, _native.stream_handle):
        with pytest.raises(ringmem.InvalidDeviceError, match=r"work .*cpu:0 of another driver \("):
            use(stream, device)
    with pytest.raises(ringmem.InvalidDeviceError, match=r"create it on cpu:0 of another driver"):
        stream.record(device.create_event())


def test_an_own_stream_is_destroyed_with_its_object(faulty):
    stream = ringmem.devices_of(faulty)[0].create_stream()
    assert faulty.live["stream"] == 1
    del stream
    assert faulty.live["stream"] == 0


def test_a_finalizer_that_fails_warns_once_and_does_not_raise(faulty):
    stream = ringmem.devices_of(faulty)[0].create_stream()
    faulty.fail("stream_destroy", when="after")
    with pytest.warns(ResourceWarning, match=r"stream 0x.* of cpu:0") as caught:
        del stream
    assert len(caught) == 1


def test_a_finalizer_that_fails_under_an_exception_leaves_it(faulty):
    stream = ringmem.devices_of(faulty)[0].create_stream()
    faulty.fail("stream_destroy", when="after")
    streams = [stream]
    del stream

    def fail():
        try:
            raise KeyError("mine")
        finally:
            streams.clear()

    with pytest.warns(ResourceWarning, match="stream 0x"), pytest.raises(KeyError, match="mine"):
        fail()


def test_close_raises_what_went_wrong_and_closes(faulty):
    stream = ringmem.devices_of(faulty)[0].create_stream()
    faulty.fail("stream_destroy", when="after")
    with pytest.raises(ringmem.DriverError, match="cuStreamDestroy"):
        stream.close()
    assert stream.closed
    stream.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stream_that_cannot_be_created_leaves_nothing(faulty, when):
    device = ringmem.devices_of(faulty)[0]
    faulty.fail("stream_create", when=when)
    with pytest.raises(ringmem.DriverError, match="cuStreamCreate"):
        device.create_stream()


def test_every_use_after_close_is_a_closed_error(device):
    stream, event, open_stream = (
        device.create_stream(),
        device.create_event(),
        device.create_stream(),
    )
    stream.close()
    for use in (
        lambda: stream.handle,
        stream.query,
        stream.synchronize,
        lambda: stream.synchronize(timeout_s=1),
        lambda: stream.wait(event),
        lambda: stream.wait(open_stream),
        lambda: open_stream.wait(stream),
        lambda: event.record(stream),
        stream.record,
        stream.__enter__,
        stream.__cuda_stream__,
        lambda: as_stream(stream, device),
        lambda: _native.stream_handle(stream, device),
    ):
        with pytest.raises(ringmem.ClosedError, match="closed(; create another|: give an open)"):
            use()
    assert "closed" in repr(stream)


def test_a_stream_is_neither_copied_nor_pickled(device):
    for stream in (device.create_stream(), device.default_stream):
        for act in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(ringmem.NotSupportedError, match="<Stream .*create another"):
                act(stream)


def test_a_stream_that_was_never_made_has_a_repr():
    class Mine(ringmem.Stream):
        def __init__(self):
            """Without super().__init__()."""

    assert repr(Mine()) == "<Mine, never initialized>"


# --- waiting -----------------------------------------------------------------------------------


def test_query_tells_pending_from_done(blocked):
    assert blocked.stream.query() is False
    blocked.open()
    blocked.stream.synchronize(timeout_s=10)
    assert blocked.stream.query() is True


def test_synchronize_gives_up_in_time_and_says_what_is_pending(blocked):
    start = time.monotonic()
    with pytest.raises(ringmem.TimeoutError, match=r"stream 0x\w+ of cpu:0 .* after 0.05 s"):
        blocked.stream.synchronize(timeout_s=0.05)
    assert 0.05 <= time.monotonic() - start < 5
    blocked.open()
    blocked.stream.synchronize(timeout_s=10)


def test_a_timeout_of_zero_only_looks(blocked):
    with pytest.raises(TimeoutError):
        blocked.stream.synchronize(timeout_s=0)


def test_an_endless_timeout_is_one(blocked):
    threading.Timer(0.02, blocked.open).start()
    blocked.stream.synchronize(timeout_s=float("inf"))


@pytest.mark.parametrize(
    "bad",
    [-1, float("nan"), -0.001, "x", [], True, np.bool_(0), pytest.param(1 << 2000, id="huge")],
)
def test_a_timeout_that_is_none_is_refused(device, bad):
    for waits in (device.create_stream(), device.create_event()):
        with pytest.raises(ringmem.InvalidValueError, match="timeout_s is "):
            waits.synchronize(timeout_s=bad)


@pytest.mark.parametrize("real", [1, np.float32(1), np.int8(1), Fraction(1, 3), Decimal("0.5")])
def test_any_real_number_is_a_timeout(device, real):
    device.create_stream().synchronize(timeout_s=real)


@pytest.mark.parametrize("timeout_s", [None, 10])
def test_waiting_releases_the_gil(blocked, timeout_s):
    # The releasing thread can only run if the waiting one lets it.
    threading.Timer(0.02, blocked.open).start()
    blocked.stream.synchronize(timeout_s)


def test_a_signal_ends_a_wait_with_a_timeout(blocked):
    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    start = time.monotonic()
    try:
        with pytest.raises(Interrupted):
            blocked.stream.synchronize(timeout_s=30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert time.monotonic() - start < 10


def test_a_stream_waits_for_a_stream_and_for_an_event(device, blocked):
    by_stream, by_event = device.create_stream(), device.create_stream()
    by_stream.wait(blocked.stream)
    by_event.wait(blocked.stream.record())
    assert not by_stream.query()
    assert not by_event.query()
    blocked.open()
    by_stream.synchronize(timeout_s=10)
    by_event.synchronize(timeout_s=10)


def test_a_stream_waits_for_one_of_another_device(pair, blocked):
    other = pair[1].create_stream()
    other.wait(blocked.stream)
    assert not other.query()
    blocked.open()
    other.synchronize(timeout_s=10)


def test_a_stream_waits_for_a_foreign_one_of_another_device(pair, blocked):
    other = pair[1].create_stream()
    other.wait(blocked.stream.handle)
    assert not other.query()
    blocked.open()
    other.synchronize(timeout_s=10)


@pytest.mark.parametrize("bad", [None, "x", True, ringmem.Stream, ringmem.Event])
def test_what_is_neither_event_nor_stream_cannot_be_waited_for(device, bad):
    with pytest.raises(ringmem.InvalidValueError, match="give an Event, a Stream,") as caught:
        device.create_stream().wait(bad)
    assert str(caught.value).startswith(f"other is {bad!r}: ")


def test_a_handle_to_wait_for_that_is_no_stream_is_named(device):
    with pytest.raises(ringmem.ClosedError, match="other is 3: .*: give an open stream of cpu:0"):
        device.create_stream().wait(3)


def test_streams_of_two_drivers_cannot_wait_for_each_other(device):
    stranger = ringmem.simulate().devices[0]
    for other in (stranger.create_stream(), stranger.create_event()):
        with pytest.raises(ringmem.InvalidDeviceError, match="different drivers"):
            device.create_stream().wait(other)


@pytest.mark.parametrize("operation", ["event_create", "event_record", "stream_wait_event"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wait_that_fails_leaves_no_event(faulty, operation, when):
    device = ringmem.devices_of(faulty)[0]
    a, b = device.create_stream(), device.create_stream()
    faulty.fail(operation, when=when)
    with pytest.raises(ringmem.DriverError):
        a.wait(b)
    assert faulty.live["event"] == 0
    a.wait(b)


def test_a_wait_whose_event_cannot_be_destroyed_at_once_leaves_none(faulty):
    device = ringmem.devices_of(faulty)[0]
    a, b = device.create_stream(), device.create_stream()
    faulty.fail("event_destroy")
    a.wait(b)
    assert faulty.live["event"] == 0


def test_an_error_of_the_device_reaches_whoever_waits(faulty):
    stream = ringmem.devices_of(faulty)[0].create_stream()
    for wait, operation in (
        (stream.query, "stream_query"),
        (lambda: stream.synchronize(timeout_s=5), "stream_query"),
        (stream.synchronize, "stream_synchronize"),
    ):
        faulty.fail(operation, status=_native.Status.illegal_address)
        with pytest.raises(ringmem.DriverError, match="ILLEGAL_ADDRESS") as caught:
            wait()
        assert caught.value.code == 700


# --- the current stream ------------------------------------------------------------------------


def test_the_current_stream_nests_and_is_the_threads_and_the_devices(pair):
    device, other = pair
    outer, inner = device.create_stream(), device.create_stream()
    elsewhere = other.create_stream()
    seen = []
    assert current_stream(device) is device.default_stream
    with outer:
        with elsewhere, inner:
            assert current_stream("cpu:0") is inner
            assert current_stream(other) is elsewhere
            thread = threading.Thread(target=lambda: seen.append(current_stream(device).handle))
            thread.start()
            thread.join()
        assert current_stream(device) is outer
        with outer:
            assert _native.stream_handle(None, device) == outer.handle
        assert current_stream(device) is outer
    assert current_stream() is device.default_stream
    assert seen == [0]


def test_none_is_the_current_stream(device):
    stream = device.create_stream()
    assert as_stream(None, device).handle == 0
    with stream:
        assert as_stream(None, device) is stream
    assert as_stream(None, device) is device.default_stream


def test_a_current_stream_that_was_closed_is_an_error(device):
    stream = device.create_stream()
    with stream:
        stream.close()
        with pytest.raises(ringmem.ClosedError):
            as_stream(None, device)
        with pytest.raises(ringmem.ClosedError):
            _native.stream_handle(None, device)
    assert as_stream(None, device) is device.default_stream


def test_a_current_stream_is_kept_alive(device):
    device.create_stream().__enter__()
    gc.collect()
    stream = current_stream(device)
    assert stream.owned
    assert not stream.closed
    stream.__exit__(None, None, None)


def test_a_thread_that_ends_inside_a_with_harms_nobody(device):
    thread = threading.Thread(target=device.create_stream().__enter__)
    thread.start()
    thread.join()
    assert current_stream(device) is device.default_stream


def test_the_default_stream_is_no_own_one(device):
    stream = device.default_stream
    assert stream is device.default_stream
    assert stream.handle == 0
    assert not stream.owned
    assert repr(stream) == "<Stream 0x0 of cpu:0, default>"
