"""Every wrong argument has a typed error that names it, its value and what would do."""

import copy
import gc
import pickle
import subprocess
import sys

import numpy as np
import pytest

import ringmem
from ringmem import ClosedError, InvalidDeviceError, InvalidValueError, NotSupportedError
from ringmem.native import _native

ALL = [ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer, ringmem.empty]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (-1, "f4", r"shape\[0\] is -1: give sizes of 0 or more"),
        ((2, -3), "f4", r"shape\[1\] is -3"),
        (1 << 63, "u1", r"shape\[0\] is 9223372036854775808: too large"),
        (-(1 << 70), "u1", "give sizes of 0 or more"),
        ((1 << 62, 4), "u1", "overflows"),
        (1 << 61, "f8", "elements of 8 bytes.*overflows"),
        ((1,) * 65, "u1", "65 dimensions: give at most 64"),
        ("3", "f4", "shape is '3'"),
        (2.5, "f4", "shape is 2.5: give an integer"),
        ((2, "x"), "f4", "give an integer or a tuple"),
        (None, "f4", "shape is None"),
        (0, None, "raw memory of 0 bytes"),
        (3, object, "Python objects"),
        (3, [("a", "i4"), ("b", "O")], "Python objects"),
        (3, "S", "no bytes; give the size"),
        (3, "nonsense", "dtype is 'nonsense'"),
        (3, 17, "dtype is 17"),
        (3, np.dtype(("f4", (2,))), "append its shape"),
    ],
)
def test_shapes_and_dtypes(device, make, shape, dtype, message):
    with pytest.raises(InvalidValueError, match=message):
        make(shape, dtype, device=device)


@pytest.mark.parametrize(
    ("make", "memory"),
    [
        (ringmem.PinnedBuffer, "page-locked host memory"),
        (ringmem.UnifiedBuffer, "managed memory"),
    ],
)
def test_memory_that_runs_out_is_named(device, make, memory):
    with pytest.raises(
        ringmem.OutOfMemoryError, match=f"{1 << 50} bytes of {memory} requested for cpu:0: ask for"
    ) as caught:
        make(1 << 50, device=device)
    assert caught.value.requested == 1 << 50


def test_devices_of_one_name_and_two_drivers_are_told_apart(device):
    theirs = ringmem.simulate(devices=2).devices
    ours, their, third = (ringmem.zeros(3, "f4", device=d) for d in (device, *theirs))
    with pytest.raises(
        InvalidDeviceError, match=r"a stream of cpu:0 of another driver .* or cpu:1$"
    ):
        their.copy_from(third, stream=device.create_stream())
    with pytest.raises(InvalidValueError, match=r"device is cpu:0 of another driver \("):
        ringmem.from_dlpack(ours, device=theirs[0], copy=False)


@pytest.mark.parametrize("make", ALL)
def test_devices(device, make):
    with pytest.raises(InvalidDeviceError, match="cpu:7"):
        make(3, "f4", device="cpu:7")
    with pytest.raises(InvalidDeviceError, match="gpu"):
        make(3, "f4", device="gpu")
    with pytest.raises(InvalidValueError, match="device is 3"):
        make(3, "f4", device=3)


@pytest.mark.parametrize("make", ALL)
def test_streams(device, other, make):
    closed = device.create_stream()
    closed.close()
    with pytest.raises(ClosedError, match="closed"):
        make(3, "f4", device=device, stream=closed)
    with pytest.raises(InvalidDeviceError, match="cpu:1"):
        make(3, "f4", device=device, stream=other.create_stream())
    with pytest.raises(InvalidValueError, match="stream is 'x'"):
        make(3, "f4", device=device, stream="x")
    with pytest.raises(ClosedError):
        make(3, "f4", device=device, stream=0x1234567)


@pytest.mark.parametrize("method", ["fill", "copy_from", "copy_to", "to_numpy", "close", "copy"])
def test_streams_of_operations(device, other, method):
    buffer = ringmem.empty(3, "f4", device=device)
    arguments = {"fill": (0,), "copy_from": (np.zeros(3, "f4"),), "copy_to": (np.zeros(3, "f4"),)}
    closed = device.create_stream()
    closed.close()
    for stream, error in ((closed, ClosedError), (other.create_stream(), InvalidDeviceError)):
        with pytest.raises(error):
            getattr(buffer, method)(*arguments.get(method, ()), stream=stream)
    assert not buffer.closed


def test_use_after_close(device):
    for make in ALL:
        buffer = make(4, "i4", device=device)
        view = buffer[:2]
        view.close()
        buffer.close()
        for closed in (buffer, view):
            for use in (
                lambda b: b.ptr,
                lambda b: b.fill(0),
                lambda b: b.copy_from(np.zeros(b.shape, b.dtype)),
                lambda b: b.copy_to(np.zeros(b.shape, b.dtype)),
                lambda b: b.to_numpy(),
                lambda b: b[0],
                lambda b: b[...],
                lambda b: b.view("u1"),
                lambda b: b.reshape(-1, 1),
                lambda b: b.copy(),
                lambda b: b.record_stream(None),
                lambda b: b.capacity,
                lambda b: b.__enter__(),
                lambda b: b.__dlpack__(),
                np.from_dlpack,
                ringmem.as_buffer,
                np.asarray,
                lambda b: b.numpy() if hasattr(b, "numpy") else b.host().__enter__(),
            ):
                with pytest.raises(ClosedError, match="is closed: make another"):
                    use(closed)
            assert closed.closed
            closed.close()


def test_copies_that_do_not_match(device):
    buffer = ringmem.zeros((2, 3), "f4", device=device)
    for source in (np.zeros((3, 2), "f4"), ringmem.zeros((6,), "f4", device=device)):
        with pytest.raises(InvalidValueError, match="shapes differ"):
            buffer.copy_from(source)
        with pytest.raises(InvalidValueError, match="shapes differ"):
            buffer.copy_to(source)
    for source in (np.zeros((2, 3), "f8"), ringmem.zeros((2, 3), "i4", device=device)):
        with pytest.raises(InvalidValueError, match="dtypes differ"):
            buffer.copy_from(source)
        with pytest.raises(InvalidValueError, match="dtypes differ"):
            buffer.copy_to(source)
    for nonsense in (3, "text", None, object()):
        with pytest.raises(InvalidValueError, match=r"source is a \w+: give a buffer"):
            buffer.copy_from(nonsense)


def test_ragged_lists(device):
    with pytest.raises(InvalidValueError, match=r"array is \[\[1\], \[1, 2\]\]: give"):
        ringmem.from_array([[1], [1, 2]], device=device)
    with pytest.raises(InvalidValueError, match=r"fill_value is \[\[1\], \[1, 2\]\]: give"):
        ringmem.full(2, [[1], [1, 2]], device=device)


def test_an_error_of_an_index_itself_is_not_hidden(device):
    class Index:
        def __index__(self):
            raise KeyError

    with pytest.raises(KeyError):
        ringmem.zeros(3, device=device)[Index()]


def test_without_ml_dtypes_its_types_say_how_to_get_it():
    program = (
        "import sys; sys.modules['ml_dtypes'] = None; import ringmem\n"
        "ringmem.DeviceBuffer(3, 'bfloat16', device='cpu')"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "InvalidValueError: dtype is 'bfloat16'" in told.stderr
    assert "pip install ml_dtypes" in told.stderr


def test_overlapping_ranges(device):
    for make in ALL:
        buffer = make(10, "i4", device=device)
        buffer.fill(1)
        with pytest.raises(InvalidValueError, match="overlap"):
            buffer[:6].copy_from(buffer[4:])
        with pytest.raises(InvalidValueError, match="overlap"):
            buffer.copy_to(buffer)
        buffer[:5].copy_from(buffer[5:])
    pinned = ringmem.PinnedBuffer(10, "i4", device=device)
    with pytest.raises(InvalidValueError, match="overlap"):
        pinned[:5].copy_from(pinned.numpy()[4:9])


def test_read_only_targets(device):
    array = np.zeros(3, "f4")
    array.flags.writeable = False
    buffer = ringmem.zeros(3, "f4", device=device)
    with pytest.raises(InvalidValueError, match="read-only"):
        buffer.copy_to(array)
    borrowed = ringmem.as_buffer(array)
    assert borrowed.readonly
    for write in (
        lambda: borrowed.fill(1),
        lambda: borrowed.copy_from(buffer),
        lambda: buffer.copy_to(borrowed),
        lambda: borrowed[:1].fill(1),
        lambda: borrowed.copy_from(np.ones(3, "f4")),
    ):
        with pytest.raises(InvalidValueError, match="read-only"):
            write()
    assert not array.any()


def test_indices(device):
    buffer = ringmem.zeros((3, 4), "f4", device=device)
    for index in (3, -4, slice(None, None, 2), slice(None, None, -1), (0, 0), "x", 1.0, None, True):
        with pytest.raises(InvalidValueError, match=r"index|slice"):
            buffer[index]
    for index in (np.array([1]), slice("a", None), slice(None, None, 0)):
        with pytest.raises(InvalidValueError, match="give an integer or a slice"):
            buffer[index]
    for index in (2**70, -(2**70)):
        with pytest.raises(InvalidValueError, match=f"index is {index} on an axis of 3"):
            buffer[index]
    with pytest.raises(InvalidValueError, match="no axis"):
        buffer.reshape(12)[0][0]
    with pytest.raises(InvalidValueError, match="index is 0 on an axis of 0: it has no elements"):
        buffer[:0][0]
    with pytest.raises(InvalidValueError, match="no axis, so no len"):
        len(buffer[0][0])


def test_flags_and_modes_are_refused_by_name(device):
    unified = ringmem.UnifiedBuffer(3, "f4", device=device)
    for nonsense in ([], 1, None, {}):
        with pytest.raises(InvalidValueError, match="attach is .*: give 'global'"):
            ringmem.UnifiedBuffer(3, "f4", device=device, attach=nonsense)
        with pytest.raises(InvalidValueError, match="mode is .*: give 'global'"):
            unified.attach(nonsense)
        with pytest.raises(InvalidValueError, match="advice is .*: give one of set_read_mostly"):
            unified.advise(nonsense)
    for window in (
        ringmem.zeros(3, device=device).numpy,
        ringmem.PinnedBuffer(3, device=device).numpy,
        lambda readonly: unified.host(readonly=readonly).__enter__(),
    ):
        for nonsense in (1, 0, "no", None):
            with pytest.raises(InvalidValueError, match="readonly is .*: give True or False"):
                window(readonly=nonsense)
    assert not ringmem.zeros(3, device=device).numpy(readonly=np.True_).flags.writeable
    with pytest.raises(InvalidValueError, match="copy is 1: give True, False or None"):
        unified.__array__(copy=1)
    with pytest.raises(InvalidValueError, match="write_combined is 1: give True or False"):
        ringmem.PinnedBuffer(3, device=device, write_combined=1)


def test_masked_elements_are_refused(device):
    masked = np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])
    buffer = ringmem.full(3, 7.0, device=device)
    for name, use in {
        "array": [
            lambda m: ringmem.from_array(m, device=device),
            lambda m: ringmem.pin(m, device=device),
        ],
        "source": [buffer.copy_from],
        "target": [buffer.copy_to],
        "obj": [ringmem.as_buffer, ringmem.from_dlpack],
    }.items():
        for take in use:
            with pytest.raises(
                InvalidValueError, match=rf"{name} has masked .*\(1 of 3\).*{name}.filled"
            ):
                take(masked)
            take(np.ma.array([1.0, 2.0, 3.0]))
    assert masked.data.tolist() == [1.0, 2.0, 3.0]
    assert buffer.to_numpy().tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("method", ["to_numpy", "copy"])
def test_a_closed_stream_of_the_buffer_asks_for_another(device, method):
    stream = device.create_stream()
    buffer = ringmem.full(3, 7.0, device=device, stream=stream)
    stream.synchronize()
    stream.close()
    with pytest.raises(ClosedError, match="the stream of .* is closed: give another as stream"):
        getattr(buffer, method)()
    result = getattr(buffer, method)(stream=device.default_stream)
    assert np.asarray(result).tolist() == [7.0] * 3


def test_views_that_do_not_fit(device):
    buffer = ringmem.zeros((3, 3), "u1", device=device)
    with pytest.raises(InvalidValueError, match="3 bytes of the last axis"):
        buffer.view("u2")
    with pytest.raises(InvalidValueError, match=r"reshape\(1\) first"):
        buffer[0][0].view("u2")
    with pytest.raises(InvalidValueError, match="has 9"):
        buffer.reshape(2, 5)
    with pytest.raises(InvalidValueError, match=r"shape is \(-1, 5\): the 9 elements .* of 5$"):
        buffer.reshape(-1, 5)
    with pytest.raises(InvalidValueError, match=r"shape is \(4294967296, -1, 4294967296\)"):
        buffer.reshape(1 << 32, -1, 1 << 32)  # whose product is 0 in 64 bits
    with pytest.raises(InvalidValueError, match="two extents of -1"):
        buffer.reshape(-1, -1)
    with pytest.raises(InvalidValueError, match="-1 beside 0"):
        buffer.reshape(-1, 0)
    with pytest.raises(InvalidValueError, match="Python objects"):
        buffer.view(object)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("u1", 256), ("u1", -1), ("i4", 1.5), ("i4", np.int64(1 << 40)), ("f4", "x"), ("i4", None)],
)
def test_fill_values_that_do_not_fit(device, dtype, value):
    with pytest.raises(InvalidValueError, match="value is"):
        ringmem.zeros(3, dtype, device=device).fill(value)


def test_memory_that_the_host_cannot_read(gpu_like):
    buffer = ringmem.full(3, 2.0, device=gpu_like)
    for read in (np.asarray, ringmem.DeviceBuffer.numpy, np.from_dlpack):
        with pytest.raises(NotSupportedError, match="to_numpy"):
            read(buffer)
    with pytest.raises((NotSupportedError, BufferError), match="to_numpy"):
        memoryview(buffer)
    assert buffer.to_numpy().tolist() == [2.0] * 3


def test_closing_under_views(device):
    for make in ALL:
        buffer = make(4, "i4", device=device)
        buffer.fill(3)
        exports = {
            "view": lambda b=buffer: b[:2],
            "view of a view": lambda b=buffer: b[:2][:1],
            "array": lambda b=buffer: (
                b.host().__enter__() if isinstance(b, ringmem.UnifiedBuffer) else b.numpy()[1:]
            ),
        }
        if make is not ringmem.UnifiedBuffer:
            exports["memoryview"] = lambda b=buffer: memoryview(b)
            exports["capsule"] = lambda b=buffer: b.__dlpack__()
            exports["from_dlpack"] = lambda b=buffer: np.from_dlpack(b)
        for name, export in exports.items():
            live = export()
            with pytest.raises(InvalidValueError, match="live view"):
                buffer.close()
            assert not buffer.closed, name
            assert buffer.to_numpy().tolist() == [3] * 4
            del live
            gc.collect()
        buffer.close()


def test_an_exception_in_a_with_block_is_not_hidden_by_closing(device):
    with pytest.raises(KeyError), ringmem.zeros(3, "f4", device=device) as buffer:
        view = buffer[:1]
        raise KeyError
    assert not buffer.closed
    view.close()
    buffer.close()


def test_closing_with_live_views_at_the_end_of_a_with_block(device):
    buffer = ringmem.zeros(3, "f4", device=device)
    with pytest.raises(InvalidValueError, match="live view"), buffer:
        view = buffer[:1]
    assert view.to_numpy().tolist() == [0.0]


def test_pickling_is_refused_with_a_remedy(device):
    buffer = ringmem.zeros(3, "f4", device=device)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(NotSupportedError, match="to_numpy"):
            attempt(buffer)


def test_out_of_memory_says_what_was_asked(device):
    with pytest.raises(ringmem.OutOfMemoryError, match=f"{1 << 40} .*: ask for less, or") as caught:
        ringmem.empty(1 << 40, device=device)
    assert isinstance(caught.value, MemoryError)
    with pytest.raises(ringmem.OutOfMemoryError):
        ringmem.UnifiedBuffer(1 << 40, device=device)


def test_no_driver():
    if not _native.cuda_driver().load_error:
        pytest.skip("there is a CUDA driver")
    with pytest.raises(ringmem.NotInitializedError):
        ringmem.empty(3, device="cuda:0")


def test_masks_of_fields_count_too(device):
    array = np.ma.zeros(3, dtype=[("a", "i4"), ("b", "f4")])
    assert ringmem.from_array(array, device=device).shape == (3,)
    array["b"][1] = np.ma.masked
    with pytest.raises(InvalidValueError, match="masked"):
        ringmem.from_array(array, device=device)
