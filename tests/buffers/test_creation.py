"""Buffers as they come: shapes, dtypes, properties, repr."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import ringmem
from ringmem.native import _native

DTYPES = [
    "?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "g", "c8", "c16", "S5", "U3", "V7", ">i4",
    "M8[ns]", "m8[s]", np.dtype([("a", "f4"), ("b", "i8", (2,))]), np.int16, float, bool,
    ml_dtypes.bfloat16, "bfloat16", "float8_e4m3fn", np.dtype(ml_dtypes.float8_e5m2),
]  # fmt: skip


@pytest.mark.parametrize("shape", [0, 1, 5, (), (3,), (2, 0, 3), (2, 3, 4), (1, 1, 1, 1, 2, 3)])
def test_shape_size_and_nbytes_are_numpys(device, shape):
    expected = np.empty(shape, "f4")
    with ringmem.DeviceBuffer(shape, "f4", device=device) as buffer:
        assert buffer.shape == expected.shape
        assert buffer.ndim == expected.ndim
        assert buffer.size == expected.size
        assert buffer.nbytes == expected.nbytes
        assert buffer.itemsize == 4
        assert buffer.capacity == expected.size


@pytest.mark.parametrize("make", [ringmem.DeviceBuffer, ringmem.empty, ringmem.PinnedBuffer])
@pytest.mark.parametrize("shape", [[2, 3], np.array([2, 3]), (np.int64(2), np.uint8(3))])
def test_any_sequence_of_integers_is_a_shape(device, make, shape):
    assert make(shape, "i2", device=device).shape == (2, 3)


def test_a_numpy_integer_is_a_shape(device):
    assert ringmem.empty(np.int32(7), "i2", device=device).shape == (7,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "make", [ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer]
)
def test_every_dtype_without_objects_makes_the_round_trip(device, make, dtype):
    wanted = np.dtype(getattr(ml_dtypes, dtype)) if dtype in ("bfloat16", "float8_e4m3fn") else (
        np.dtype(dtype)
    )  # fmt: skip
    source = np.frombuffer(np.random.default_rng(1).bytes(6 * wanted.itemsize), "u1")
    if wanted.kind == "U":
        source = np.array(["abc", "", "ü"] * 2, wanted).view("u1")
    array = source.view(wanted).reshape(2, 3)
    with make((2, 3), dtype, device=device) as buffer:
        assert buffer.dtype == wanted
        buffer.copy_from(array)
        assert buffer.to_numpy().tobytes() == array.tobytes()


def test_without_a_dtype_memory_is_raw_bytes(device):
    assert ringmem.DeviceBuffer(100, device=device).dtype == np.uint8


@pytest.mark.parametrize(
    "make", [ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer]
)
def test_a_typed_buffer_of_size_0_makes_no_driver_call(faulty, make):
    device = ringmem.devices_of(faulty)[0]
    if make is ringmem.UnifiedBuffer:
        assert device.capabilities.managed_memory  # asked once, then kept
    before = sum(faulty.calls.values())
    with make((0, 3), "f8", device=device) as buffer:
        buffer.fill(1.0)
        buffer.copy_from(np.empty((0, 3)))
        assert buffer.ptr == 0
        assert (buffer.size, buffer.nbytes, buffer.capacity) == (0, 0, 0)
    assert sum(faulty.calls.values()) == before


def test_the_device_comes_from_the_stream(device, other):
    stream = other.create_stream()
    buffer = ringmem.empty(3, "f4", stream=stream)
    assert buffer.device is other
    assert buffer.stream is stream


def test_the_stream_is_the_current_one(device):
    stream = device.create_stream()
    with stream:
        assert ringmem.empty(3, "f4", device=device).stream is stream
    assert ringmem.empty(3, "f4", device=device).stream is device.default_stream


def test_the_default_device_is_used_where_none_is_named(device):
    assert ringmem.empty(1).device is device
    assert ringmem.DeviceBuffer(1).device is device
    assert ringmem.PinnedBuffer(1).device is device
    assert ringmem.UnifiedBuffer(1).device is device


def test_a_users_subclass_is_constructed_by_its_own_init(device):
    class Tagged(ringmem.DeviceBuffer):
        def __init__(self, tag, size):
            super().__init__(size, "f4", device=device)
            self.tag = tag

    buffer = Tagged("weights", 5)
    assert (buffer.tag, buffer.shape) == ("weights", (5,))
    assert buffer[:2].to_numpy().shape == (2,)
    assert type(buffer.copy()) is ringmem.DeviceBuffer


@pytest.mark.parametrize("make", [ringmem.DeviceBuffer, ringmem.empty])
def test_arguments_are_checked_like_pythons(device, make):
    with pytest.raises(TypeError, match="shape"):
        make()
    with pytest.raises(TypeError, match="unknown argument 'sahpe'"):
        make(1, sahpe=2)
    with pytest.raises(TypeError, match="two values for 'shape'"):
        make(1, shape=2)
    with pytest.raises(TypeError, match="by name"):
        make(1, "f4", device)
    assert make(shape=2, dtype="f4", device=device, stream=None, allocator=None).size == 2


def test_zeros_full_and_from_array(device):
    assert ringmem.zeros((2, 2), "c8", device=device).to_numpy().tolist() == [[0, 0], [0, 0]]
    assert ringmem.full(2, 7, "i2", device=device).to_numpy().tolist() == [7, 7]
    assert ringmem.full(2, 1.5, device=device).dtype == np.float64
    assert ringmem.from_array([[1, 2], [3, 4]], device=device).to_numpy().tolist() == [
        [1, 2],
        [3, 4],
    ]


def test_copy_makes_an_independent_buffer(device):
    for make in (ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer):
        buffer = make(3, "i4", device=device)
        buffer.fill(5)
        duplicate = buffer.copy()
        buffer.fill(6)
        assert type(duplicate) is make
        assert duplicate.to_numpy().tolist() == [5, 5, 5]


def test_repr_tells_what_it_is_where_and_how_large(device):
    buffer = ringmem.empty((512, 1024), "f4", device=device)
    text = repr(buffer)
    for part in ("DeviceBuffer (512, 1024) float32 on cpu:0", "2 MiB", f"{buffer.ptr:#x}", "0x0"):
        assert part in text
    assert repr(buffer[0]).endswith("view>")
    buffer.close()
    assert repr(buffer) == "<DeviceBuffer (512, 1024) float32 on cpu:0, closed>"
    stream = device.create_stream()
    open_buffer = ringmem.empty(3, device=device, stream=stream)
    handle = stream.handle
    stream.close()
    assert repr(open_buffer).endswith(f", closed stream {handle:#x}>")


@pytest.mark.parametrize(
    "kind", [ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer]
)
def test_a_buffer_that_was_never_made_has_a_repr(kind):
    class Mine(kind):
        def __init__(self):
            """Without super().__init__()."""

    assert repr(Mine()) == "<Mine, never initialized>"


def test_the_place_of_allocation_is_kept_when_tracking_is_on(device):
    before = ringmem.track_allocation_places(True)
    try:
        direct = ringmem.DeviceBuffer(1, device=device)
        through = ringmem.zeros(1, device=device)
    finally:
        ringmem.track_allocation_places(before)
    untracked = ringmem.empty(1, device=device)
    for buffer in (direct, through):
        file, line = _native.buffer_place(buffer)
        assert file == __file__
        assert "device=device" in open(file).read().splitlines()[line - 1]  # noqa: SIM115
    assert _native.buffer_place(untracked) is None


def test_tracking_is_an_environment_variable_too(device):
    code = "import ringmem; print(ringmem.track_allocation_places(False))"
    for value, wanted in (("1", "True"), ("0", "False")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RINGMEM_TRACK_PLACES": value},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.strip() == wanted, done.stderr
