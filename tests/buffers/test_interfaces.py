"""The CUDA array interface and as_buffer. Without a GPU the interface is tried on a CPU device,
which its functions do not mind; only the attribute hides it there.
"""

import numpy as np
import pytest

import ringmem
from ringmem import InvalidValueError
from ringmem.buffers.array_interface import borrow_array_interface, describe
from ringmem.native import _native


class Holder:
    """Another library's array."""

    def __init__(self, buffer, **changes):
        self.interface = {**describe(buffer), **changes}
        self.buffer = buffer

    @property
    def __cuda_array_interface__(self):
        return self.interface


@pytest.fixture
def buffer(device):
    return ringmem.from_array(np.arange(12, dtype="f4").reshape(3, 4), device=device)


def test_the_interface_has_every_field_of_version_3(buffer):
    assert describe(buffer) == {
        "shape": (3, 4),
        "typestr": "<f4",
        "data": (buffer.ptr, False),
        "strides": None,
        "stream": 1,
        "version": 3,
    }


def test_the_stream_is_the_buffers(device):
    stream = device.create_stream()
    assert describe(ringmem.empty(3, stream=stream))["stream"] == stream.handle


def test_cpu_memory_is_not_offered_to_cuda_libraries(buffer):
    assert not hasattr(buffer, "__cuda_array_interface__")


def test_the_stream_offered_waits_for_work_on_others(slow):
    stream, other = slow.create_stream(), slow.create_stream()
    buffer = ringmem.zeros(1000, "i4", stream=stream)
    stream.synchronize()
    buffer.fill(3, other)
    assert describe(buffer)["stream"] == stream.handle
    seen = ringmem.PinnedBuffer(1000, "i4", device=slow)
    slow.driver.copy_async(0, seen.ptr, buffer.ptr, buffer.nbytes, stream.handle)
    stream.synchronize()
    assert (seen.numpy() == 3).all()


@pytest.mark.parametrize(
    "make", [ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer]
)
def test_borrowing_shares_memory_and_finds_its_kind(device, make):
    buffer = make((3, 4), "f4", device=device)
    buffer.fill(5)
    borrowed = borrow_array_interface(Holder(buffer), device)
    assert type(borrowed) is make
    assert (borrowed.ptr, borrowed.shape, borrowed.dtype) == (buffer.ptr, (3, 4), buffer.dtype)
    assert (borrowed.to_numpy() == 5).all()


def test_the_device_of_the_memory_is_found(device, other):
    buffer = ringmem.zeros(3, device=other)
    assert borrow_array_interface(Holder(buffer), other).device is other
    with pytest.raises(InvalidValueError, match="is on cpu:1"):
        borrow_array_interface(Holder(buffer), device)


def test_work_on_borrowed_memory_comes_after_the_producers(slow):
    theirs, ours = slow.create_stream(), slow.create_stream()
    buffer = ringmem.zeros(1000, "i4", stream=theirs)
    buffer.fill(8)
    borrowed = borrow_array_interface(Holder(buffer), slow, ours)
    seen = ringmem.PinnedBuffer(1000, "i4", device=slow)
    borrowed.copy_to(seen)
    ours.synchronize()
    assert (seen.numpy() == 8).all()


def test_structured_types_survive(device):
    dtype = np.dtype([("a", "i4"), ("b", "f8")])
    buffer = ringmem.zeros(3, dtype, device=device)
    assert borrow_array_interface(Holder(buffer), device).dtype == dtype


def test_types_without_a_type_string_are_refused(device):
    with pytest.raises(InvalidValueError, match=r"DLPack, or view\('u2'\)"):
        describe(ringmem.zeros(3, "bfloat16", device=device))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strides": (32, 8)}, "contiguous"),
        ({"mask": object()}, "mask"),
        ({"stream": 0}, "allows None, 1, 2 or a handle"),
        ({"stream": -1}, "allows None, 1, 2 or a handle"),
        ({"data": (64, False)}, "no memory that"),
        ({"data": None}, "it must be a dict with shape, typestr and data"),
        ({"data": (1 << 64, False)}, "it must be a dict"),
        ({"shape": 3}, "it must be a dict"),
        ({"shape": (-1,)}, r"shape\[0\] is -1"),
        ({"typestr": "nope"}, "it must be a dict"),
        ({"strides": (4,)}, "it must be a dict"),
    ],
)
def test_interfaces_that_cannot_be_taken(device, buffer, changes, message):
    with pytest.raises(InvalidValueError, match=message):
        borrow_array_interface(Holder(buffer, **changes), device)


@pytest.mark.parametrize("interface", [{}, None, 3, {"shape": (1,), "typestr": "<f4"}])
def test_what_is_no_interface_is_refused(device, buffer, interface):
    holder = Holder(buffer)
    holder.interface = interface
    with pytest.raises(InvalidValueError, match="Holder.__cuda_array_interface__ is.* must be a"):
        borrow_array_interface(holder, device)


def test_explicit_contiguous_strides_and_no_stream_are_taken(device, buffer):
    borrowed = borrow_array_interface(Holder(buffer, strides=(16, 4), stream=None), device)
    assert borrowed.shape == (3, 4)


def test_empty_memory_has_no_address(device):
    buffer = ringmem.empty((0, 4), "f4", device=device)
    borrowed = borrow_array_interface(Holder(buffer), device)
    assert (borrowed.ptr, borrowed.shape) == (0, (0, 4))


def test_read_only_memory_stays_so(device, buffer):
    borrowed = borrow_array_interface(Holder(buffer, data=(buffer.ptr, True)), device)
    assert borrowed.readonly
    assert describe(borrowed)["data"] == (buffer.ptr, True)


# --- as_buffer -----------------------------------------------------------------------------------


def test_a_buffer_is_itself(buffer):
    assert ringmem.as_buffer(buffer) is buffer


@pytest.mark.parametrize(
    "holder",
    [
        np.arange(6, dtype="i2").reshape(2, 3),
        bytearray(b"abcdef"),
        b"abcdef",
        memoryview(b"abcdef").cast("B", (2, 3)),
        np.array([], "f4"),
    ],
    ids=lambda holder: f"{type(holder).__name__}{len(holder)}",
)
def test_host_memory_is_borrowed_in_place(device, holder):
    array = np.asarray(memoryview(holder))
    borrowed = ringmem.as_buffer(holder)
    assert (borrowed.shape, borrowed.dtype) == (array.shape, array.dtype)
    assert borrowed.ptr == (array.ctypes.data if array.size else 0)
    assert borrowed.readonly is (not array.flags.writeable)
    assert borrowed.to_numpy().tobytes() == array.tobytes()


def test_borrowed_host_memory_is_filled_copied_and_viewed(device):
    array = np.zeros(6, "i4")
    borrowed = ringmem.as_buffer(array)
    borrowed[:3].fill(7)
    assert array.tolist() == [7, 7, 7, 0, 0, 0]
    target = ringmem.zeros(6, "i4", device=device)
    target.copy_from(borrowed)
    target.fill(2)
    target.copy_to(borrowed)
    assert _native.buffer_uses(borrowed) == 0
    assert ringmem.as_buffer(array).to_numpy().tolist() == [2] * 6
    assert np.asarray(borrowed).ctypes.data == array.ctypes.data


def test_what_offers_no_memory_is_refused(device):
    for nonsense in (3, [1], "text", None, object()):
        with pytest.raises(InvalidValueError, match="obj is a"):
            ringmem.as_buffer(nonsense)
    with pytest.raises(InvalidValueError, match="strides"):
        ringmem.as_buffer(np.zeros((4, 4))[:, 1])
