"""Streams of other libraries: used as they are, checked, never destroyed."""

import ctypes
import gc
import weakref

import pytest

import ringmem
from ringmem import as_stream
from ringmem.native import _native


def protocol_method(handle):
    class WithMethod:
        def __cuda_stream__(self):
            return (0, handle)

    return WithMethod()


def protocol_attribute(handle):
    class WithAttribute:
        __cuda_stream__ = (0, handle)

    return WithAttribute()


def like(attribute, value):
    return type("ForeignStream", (), {attribute: value})()


FOREIGN = {
    "an integer": lambda h: h,
    "the protocol as a method": protocol_method,
    "the protocol as an attribute": protocol_attribute,
    "PyTorch": lambda h: like("cuda_stream", h),
    "CuPy": lambda h: like("ptr", h),
    "Numba, ctypes": lambda h: like("handle", ctypes.c_void_p(h)),
    "cuda.core": lambda h: like("handle", type("Handle", (), {"__index__": lambda self: h})()),
    "NumPy": lambda h: __import__("numpy").uint64(h),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_streams_of_other_libraries_are_used_and_never_destroyed(faulty, kind):
    device = ringmem.devices_of(faulty)[0]
    own = device.create_stream()
    foreign = FOREIGN[kind](own.handle)
    stream = as_stream(foreign, device)
    assert stream.handle == own.handle
    assert not stream.owned
    assert _native.stream_handle(foreign, device) == own.handle
    stream.close()
    assert own.query()
    own.close()


@pytest.mark.parametrize("kind", FOREIGN)
def test_default_streams_of_other_libraries_are_the_default(device, kind):
    assert as_stream(FOREIGN[kind](0), device).handle == 0


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_the_default_handles_work(device, handle):
    stream = as_stream(handle, device)
    assert stream.handle == handle
    stream.synchronize(timeout_s=10)
    assert "default" in repr(stream)


def test_a_foreign_stream_is_kept_alive_as_long_as_ours(device):
    own = device.create_stream()
    foreign = like("cuda_stream", own.handle)
    kept = weakref.ref(foreign)
    stream = as_stream(foreign, device)
    del foreign
    assert kept() is not None
    del stream
    assert kept() is None


def test_a_foreign_stream_that_holds_ours_is_collected(device):
    own = device.create_stream()
    foreign = like("cuda_stream", own.handle)
    foreign.ours = as_stream(foreign, device)
    kept = weakref.ref(foreign)
    del foreign
    gc.collect()
    assert kept() is None


def test_a_stream_of_another_device_is_refused_by_both_names(pair):
    device, other = pair
    theirs = other.create_stream()
    for stream in (theirs, theirs.handle, protocol_method(theirs.handle)):
        for use in (as_stream, _native.stream_handle):
            with pytest.raises(ringmem.InvalidDeviceError, match="cpu:1") as caught:
                use(stream, device)
            assert "cpu:0" in str(caught.value)


def test_a_destroyed_foreign_stream_is_closed(device):
    own = device.create_stream()
    handle = own.handle
    own.close()
    with pytest.raises(ringmem.ClosedError, match=f"{handle:#x}"):
        as_stream(protocol_method(handle), device)


def test_a_handle_that_never_was_is_named_with_what_would_do(device):
    with pytest.raises(ringmem.ClosedError, match="^stream is 3: .*: give an open stream of cpu:0"):
        ringmem.empty(3, device=device, stream=3)


@pytest.mark.parametrize(
    "bad",
    [
        "stream",
        1.5,
        -1,
        1 << 64,
        True,
        object(),
        ringmem.Stream,
        protocol_attribute,
        like("handle", "x"),
        like("cuda_stream", None),
        type("Broken", (), {"__cuda_stream__": 3})(),
        type("Broken", (), {"__cuda_stream__": (0,)})(),
    ],
)
def test_what_is_no_stream_is_refused(device, bad):
    with pytest.raises(ringmem.InvalidValueError, match="stream is ") as caught:
        as_stream(bad, device)
    assert repr(bad) in str(caught.value)


def test_an_unknown_version_of_the_protocol_is_refused(device):
    newer = type("Newer", (), {"__cuda_stream__": lambda self: (7, 0)})()
    with pytest.raises(ringmem.InvalidValueError, match="version 7"):
        as_stream(newer, device)


def test_a_protocol_that_raises_is_not_hidden(device):
    def fail(self):
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        as_stream(type("Broken", (), {"__cuda_stream__": fail})(), device)


def test_memory_and_events_are_no_streams(device):
    buffer = ringmem.empty(4, device=device)
    for wrong in (device.create_event(), buffer):
        with pytest.raises(ringmem.InvalidValueError, match=r"stream is <.*: give None, a Stream"):
            as_stream(wrong, device)
