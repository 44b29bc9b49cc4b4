"""What CUDA refuses while a graph is captured, and what spoils the capture; FaultyDriver's rules are
held to the same. The other tests here stand on this."""

import pytest

import ringmem

UNSUPPORTED, INVALIDATED, UNJOINED, ISOLATION, CAPTURED_EVENT = 900, 901, 904, 905, 907


def query_a_captured_event(room, driver, event, ptr):
    driver.event_record(0, event, room.captured.handle)
    driver.event_query(0, event)


def wait_for_a_captured_event(room, driver, event, ptr):
    driver.event_record(0, event, room.captured.handle)
    driver.event_synchronize(0, event)


def query_the_stream(room, driver, event, ptr):
    driver.stream_query(0, room.captured.handle)


def synchronize_the_stream(room, driver, event, ptr):
    driver.stream_synchronize(0, room.captured.handle)


def synchronize_the_device(room, driver, event, ptr):
    driver.synchronize(0)


def make_it_wait_for_others(room, driver, event, ptr):
    driver.event_record(0, event, room.stream.handle)
    driver.stream_wait_event(0, room.captured.handle, event)


def make_others_wait_for_it(room, driver, event, ptr):
    driver.event_record(0, event, room.captured.handle)
    driver.stream_wait_event(0, room.stream.handle, event)
    driver.fill_async(0, ptr, 1, 1, 16, room.stream.handle)


def ask_for_the_device(room, driver, event, ptr):
    driver.stream_device(room.captured.handle)


def go_on_elsewhere(room, driver, event, ptr):
    driver.event_record(0, event, room.stream.handle)
    driver.event_synchronize(0, event)
    driver.event_query(0, event)
    driver.stream_wait_event(0, room.later.handle, event)
    driver.stream_synchronize(0, room.stream.handle)
    driver.stream_query(0, room.stream.handle)
    driver.fill_async(0, ptr, 1, 1, 16, room.stream.handle)


@pytest.mark.parametrize(
    ("act", "answer", "end"),
    [
        (query_a_captured_event, CAPTURED_EVENT, INVALIDATED),
        (wait_for_a_captured_event, CAPTURED_EVENT, INVALIDATED),
        (query_the_stream, UNSUPPORTED, 0),  # these two CUDA would refuse, and spoil the capture
        (synchronize_the_stream, UNSUPPORTED, 0),
        (synchronize_the_device, UNSUPPORTED, INVALIDATED),
        (make_it_wait_for_others, ISOLATION, INVALIDATED),
        (make_others_wait_for_it, 0, UNJOINED),
        (ask_for_the_device, 0, 0),
        (go_on_elsewhere, 0, 0),
    ],
)
def test_what_spoils_a_capture(room, act, answer, end):
    driver = room.device.driver
    memory = ringmem.zeros(16, "uint8", device=room.device, stream=room.stream)
    room.stream.synchronize()
    event = driver.event_create(0, timing=False)
    room.begin(room.captured)
    try:
        assert driver.stream_capturing(0, room.captured.handle)
        assert not driver.stream_capturing(0, room.later.handle)
        status = 0
        try:
            act(room, driver, event, memory.ptr)
        except ringmem.DriverError as error:
            status = error.code
    finally:
        ended, _ = room.end(room.captured)
    assert (status, ended) == (answer, end)
    assert not driver.stream_capturing(0, room.captured.handle)
    driver.event_destroy(0, event)
    memory.close()


def test_a_stream_that_is_gone_cannot_tell(room):
    stream = room.device.create_stream()
    stream.close()
    with pytest.raises(ringmem.ClosedError):
        _ = stream.is_capturing
