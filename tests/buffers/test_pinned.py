"""Page-locked memory: new, and memory that exists."""

import gc
import mmap
import weakref

import numpy as np
import pytest

import ringmem
from ringmem.native import _native


def test_the_array_is_the_memory(device):
    buffer = ringmem.PinnedBuffer((2, 3), "f4", device=device)
    window = buffer.numpy()
    assert window.ctypes.data == buffer.ptr
    assert (window.shape, window.dtype) == ((2, 3), np.float32)
    window[...] = 5
    assert (buffer.to_numpy() == 5).all()


def test_a_read_only_array_cannot_be_written(device):
    buffer = ringmem.PinnedBuffer(3, "f4", device=device)
    assert buffer.numpy().flags.writeable
    window = buffer.numpy(readonly=True)
    assert not window.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        window[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        window.flags.writeable = True


def test_views_have_arrays_of_their_own_part(device):
    buffer = ringmem.PinnedBuffer(10, "i4", device=device)
    buffer.numpy()[:] = np.arange(10)
    assert buffer[3:5].numpy().tolist() == [3, 4]
    assert buffer[3].numpy().shape == ()


def test_kernels_see_it_at_device_ptr(device):
    buffer = ringmem.PinnedBuffer(3, "f4", device=device)
    assert buffer.device_ptr == device.driver.host_device_pointer(0, buffer.ptr)
    assert ringmem.PinnedBuffer(0, "f4", device=device).device_ptr == 0


def test_write_combined_memory_and_an_allocator_exclude_each_other(device):
    with ringmem.PinnedBuffer(100, device=device, write_combined=True) as buffer:
        buffer.fill(3)
        assert buffer.to_numpy().tolist() == [3] * 100
    with pytest.raises(ringmem.InvalidValueError, match="write_combined"):
        ringmem.PinnedBuffer(100, device=device, write_combined=True, allocator=object())


def test_arrays_and_bytes_through_the_buffer_protocol(device):
    dtype = np.dtype([("a", "i4"), ("b", "f8")])
    for wanted in ("f4", "i8", "?", "c8", dtype):
        buffer = ringmem.PinnedBuffer((2, 2), wanted, device=device)
        view = memoryview(buffer)
        assert view.format == memoryview(np.empty(1, wanted)).format
        assert view.shape == (2, 2)
        assert not view.readonly
        assert view.nbytes == buffer.nbytes
    times = ringmem.PinnedBuffer(3, "M8[s]", device=device)
    with pytest.raises(ringmem.InvalidValueError, match=r'view\("i8"\)'):
        memoryview(times)
    assert memoryview(times.view("i8")).format in ("l", "q")
    times.fill(np.datetime64(9, "s"))
    assert np.asarray(times).astype("i8").tolist() == [9, 9, 9]


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [("bfloat16", "u2"), ("float8_e4m3fn", "u1"), ("float8_e5m2", "u1"),
     ("int4", "u1"), ("V5", "u1"), ("V4", "u4"),
     ([("a", "M8[s]")], "u8"), ({"names": ["a"], "formats": ["i4"], "itemsize": 12}, "u1")],
)  # fmt: skip
def test_types_without_a_format_of_the_buffer_protocol_stay_themselves(device, dtype, remedy):
    buffer = ringmem.PinnedBuffer(3, dtype, device=device)
    with pytest.raises(ringmem.InvalidValueError, match=rf'has no format for .*view\("{remedy}"\)'):
        memoryview(buffer)
    assert memoryview(buffer.view(remedy)).nbytes == buffer.nbytes
    assert b"".join([buffer]) == buffer.to_numpy().tobytes()  # no format asked for
    array = np.asarray(buffer)
    assert (array.dtype, array.ctypes.data) == (buffer.dtype, buffer.ptr)


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([("a", "i1"), ("b", "i4")], align=True),
        np.dtype([("a", "V5"), ("b", "f4")]),
        np.dtype([("a", [("b", "S3"), ("c", ">f8", (2,))])]),
    ],
)
def test_padded_and_nested_structures_have_a_format(device, dtype):
    array = np.asarray(memoryview(ringmem.PinnedBuffer(3, dtype, device=device)))
    assert array.dtype == dtype


def test_array_protocol_converts_and_copies_on_request(device):
    buffer = ringmem.PinnedBuffer(3, "f4", device=device)
    buffer.fill(2)
    assert np.asarray(buffer).ctypes.data == buffer.ptr
    assert buffer.__array__().ctypes.data == buffer.ptr
    assert buffer.__array__(copy=True).ctypes.data != buffer.ptr
    assert buffer.__array__("f8").tolist() == [2.0] * 3
    with pytest.raises(ringmem.InvalidValueError, match="copy is False"):
        buffer.__array__("f8", copy=False)
    assert np.array(buffer, "i4").tolist() == [2, 2, 2]


# --- memory that exists --------------------------------------------------------------------------


def test_pinning_locks_the_array_in_place_and_unlocks_it_after_closing(faulty):
    device = ringmem.devices_of(faulty)[0]
    array = np.arange(5000, dtype="i4").reshape(5, 1000)
    buffer = ringmem.pin(array, device=device)
    assert isinstance(buffer, ringmem.PinnedBuffer)
    assert (buffer.ptr, buffer.shape, buffer.dtype) == (array.ctypes.data, (5, 1000), array.dtype)
    assert faulty.live["registered"] == 1
    info = device.driver.pointer_info(0, buffer.ptr)
    assert info.kind == _native.PointerKind.pinned
    buffer[0].fill(-1)
    buffer.stream.synchronize()
    assert (array[0] == -1).all()
    buffer.close()
    assert _native.flush_reaper(10)
    assert faulty.live["registered"] == 0
    assert device.driver.pointer_info(0, array.ctypes.data).kind == _native.PointerKind.unregistered


def test_a_pinned_array_lives_until_its_pages_are_unlocked(slow):
    class Array(np.ndarray):
        pass

    array = np.zeros(5000).view(Array)
    gone = weakref.ref(array)
    buffer = ringmem.pin(array, device=slow)
    buffer.fill(1.5)
    del array
    gc.collect()
    buffer.close()
    assert gone() is not None
    assert _native.flush_reaper(10)
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4))[:, :2], "only contiguous memory"),
        (np.zeros((4, 4)).T[:2], "only contiguous memory"),
        ([1, 2, 3], "give a NumPy array"),
        (np.array([None]), "Python objects"),
    ],
)
def test_what_cannot_be_pinned(device, array, message):
    with pytest.raises(ringmem.InvalidValueError, match=message):
        ringmem.pin(array, device=device)


def test_an_array_of_size_0_needs_no_driver(faulty):
    device = ringmem.devices_of(faulty)[0]
    device.capabilities  # noqa: B018
    before = sum(faulty.calls.values())
    ringmem.pin(np.zeros((0, 4)), device=device).close()
    assert sum(faulty.calls.values()) == before


def test_pinning_twice_is_refused_and_loses_nothing(faulty):
    device = ringmem.devices_of(faulty)[0]
    array = np.zeros(1000)
    first = ringmem.pin(array, device=device)
    with pytest.raises(ringmem.DriverError, match="ALREADY_REGISTERED"):
        ringmem.pin(array, device=device)
    first.close()
    assert _native.flush_reaper(10)
    ringmem.pin(array, device=device).close()


def test_read_only_memory_is_pinned_where_the_device_can(device, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    with path.open("rb") as file:
        array = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), "u1")
    if not device.capabilities.read_only_host_register:
        with pytest.raises(ringmem.NotSupportedError, match="read-only"):
            ringmem.pin(array, device=device)
        return
    buffer = ringmem.pin(array, device=device)
    assert buffer.readonly
    with pytest.raises(ringmem.InvalidValueError, match="read-only"):
        buffer.fill(0)
    with pytest.raises(ringmem.InvalidValueError, match="readonly is False"):
        buffer.numpy()
    assert bytes(buffer.numpy(readonly=True)[:2]) == b"xx"


def test_a_device_that_cannot_pin_says_so():
    (device,) = ringmem.simulate(host_register=False).devices
    with pytest.raises(ringmem.NotSupportedError, match="PinnedBuffer"):
        ringmem.pin(np.zeros(10), device=device)
