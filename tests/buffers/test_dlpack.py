"""DLPack, both ways."""

import gc

import numpy as np
import pytest

import ringmem
from ringmem import InvalidValueError
from ringmem.native import _native

READABLE = [ringmem.DeviceBuffer, ringmem.PinnedBuffer]


@pytest.mark.parametrize("make", READABLE)
@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3, 4)])
def test_numpy_reads_a_buffer_without_a_copy(device, make, dtype, shape):
    buffer = make(shape, dtype, device=device)
    buffer.fill(1)
    array = np.from_dlpack(buffer)
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert (array == 1).all()
    if array.size:
        assert array.ctypes.data == buffer.ptr
        buffer.fill(0)
        buffer.stream.synchronize()
        assert (array == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_of_ml_dtypes_have_their_own_codes(device, dtype):
    buffer = ringmem.full(4, 1.5, dtype, device=device)
    again = ringmem.from_dlpack(buffer)
    assert again.dtype == buffer.dtype
    assert again.to_numpy().tobytes() == buffer.to_numpy().tobytes()


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [("M8[s]", "view.'i8'"), ("S4", "view.'u1'"), ([("a", "f4")], "view.'u1'"),
     (">f4", "byte order"), ("g", "view.'u1'"), ("V4", "view.'u1'")],
)  # fmt: skip
def test_types_that_dlpack_lacks_are_refused_with_a_remedy(device, dtype, remedy):
    buffer = ringmem.zeros(4, dtype, device=device)
    with pytest.raises(InvalidValueError, match=remedy):
        buffer.__dlpack__()
    assert _native.buffer_uses(buffer) == 0


def test_the_device_is_the_host_for_cpu_devices(device):
    for make in (*READABLE, ringmem.UnifiedBuffer):
        assert make(3, device=device).__dlpack_device__() == (1, 0)


def test_a_capsule_is_versioned_for_who_reads_that(device):
    buffer = ringmem.zeros(3, "f4", device=device)
    assert "dltensor_versioned" in repr(buffer.__dlpack__(max_version=(1, 0)))
    assert "dltensor_versioned" in repr(buffer.__dlpack__(max_version=(2, 5)))
    for old in (None, (0, 8)):
        capsule = repr(buffer.__dlpack__(max_version=old))
        assert '"dltensor"' in capsule


def test_an_unconsumed_capsule_lets_go(device):
    buffer = ringmem.zeros(3, "f4", device=device)
    for version in (None, (1, 0)):
        capsule = buffer.__dlpack__(max_version=version)
        assert _native.buffer_uses(buffer) == 1
        del capsule
        assert _native.buffer_uses(buffer) == 0


def test_a_consumed_capsule_cannot_be_consumed_again(device):
    buffer = ringmem.zeros(3, "f4", device=device)
    capsule = buffer.__dlpack__(max_version=(1, 0))
    taken = _native.take_dlpack_capsule(capsule)
    with pytest.raises(InvalidValueError, match="fresh capsule"):
        _native.take_dlpack_capsule(capsule)
    del capsule
    assert _native.buffer_uses(buffer) == 1
    del taken
    assert _native.buffer_uses(buffer) == 0


def test_the_consumer_keeps_the_memory(device):
    array = np.from_dlpack(ringmem.full(1000, 7, "i4", device=device))
    gc.collect()
    ringmem.full(1000, 9, "i4", device=device)
    assert (array == 7).all()


def test_read_only_memory_stays_so(device):
    source = np.arange(3)
    source.flags.writeable = False
    buffer = ringmem.as_buffer(source)
    assert not np.from_dlpack(buffer).flags.writeable
    with pytest.raises(InvalidValueError, match="max_version"):
        buffer.__dlpack__()
    again = ringmem.from_dlpack(buffer)
    assert again.readonly


def test_copies_on_request(device):
    for make in READABLE:
        buffer = make(3, "i4", device=device)
        buffer.fill(5)
        copy = np.from_dlpack(buffer, copy=True)
        buffer.fill(6)
        buffer.stream.synchronize()
        assert copy.tolist() == [5, 5, 5]
        assert np.from_dlpack(buffer, copy=False).ctypes.data == buffer.ptr
        del copy
    managed = ringmem.UnifiedBuffer(3, "i4", device=device)
    managed.fill(4)
    assert np.from_dlpack(managed, copy=True).tolist() == [4, 4, 4]


def test_streams_of_host_memory_are_none(device):
    buffer = ringmem.zeros(3, "f4", device=device)
    for stream in (1, 2, -1, 0):
        with pytest.raises(InvalidValueError, match="give None"):
            buffer.__dlpack__(stream=stream)


def test_other_devices_are_refused(device):
    buffer = ringmem.zeros(3, "f4", device=device)
    for wanted in ((2, 0), (3, 0), (1, 1), (10, 0)):
        with pytest.raises(InvalidValueError, match="dl_device"):
            buffer.__dlpack__(dl_device=wanted)
    assert np.from_dlpack(buffer, device="cpu").tolist() == [0, 0, 0]
    for nonsense in (5, (1,), (1, None), "x"):
        with pytest.raises(InvalidValueError, match=r"dl_device is .*: give two integers"):
            buffer.__dlpack__(dl_device=nonsense)
    with pytest.raises(InvalidValueError, match="max_version is 3: give two integers"):
        buffer.__dlpack__(max_version=3)
    with pytest.raises(InvalidValueError, match=r"dl_device is \(1.9, 0\): give two integers"):
        buffer.__dlpack__(dl_device=(1.9, 0))


def test_a_copy_is_asked_for_with_true_or_false_alone(device):
    buffer = ringmem.zeros(3, "f4", device=device)
    array = np.zeros(3, "f4")
    for export in (buffer.__dlpack__, lambda copy: ringmem.from_dlpack(array, copy=copy)):
        for nonsense in (1, 0, "no", [], 1.0):
            with pytest.raises(InvalidValueError, match=r"copy is .*: give True, False or None"):
                export(copy=nonsense)
    assert ringmem.from_dlpack(array, copy=np.True_).ptr != array.ctypes.data
    assert ringmem.from_dlpack(array, copy=np.False_).ptr == array.ctypes.data
    assert np.from_dlpack(buffer, copy=np.True_).ctypes.data != buffer.ptr
    with pytest.raises(InvalidValueError, match="copy is False"):
        ringmem.from_dlpack(array, device=ringmem.Device("cpu:1"), copy=np.False_)


def hidden(device):
    return ringmem.full(3, 2.0, device=device)


def unshared(device):
    return ringmem.UnifiedBuffer(3, "f8", device=device)


@pytest.mark.parametrize(
    ("make", "settings"),
    [(hidden, {"strict": True}), (unshared, {"concurrent_managed_access": False})],
)
def test_memory_that_the_host_cannot_share_is_copied_to_it(make, settings):
    """As a GPU's is; for the same request without a device DLPack has no name of the place."""
    with ringmem.simulate(**settings) as simulation:
        buffer = make(simulation.devices[0])
        buffer.fill(2)
        for copy in (True, None):
            array = np.from_dlpack(buffer, device="cpu", copy=copy)
            buffer.fill(3)
            assert array.tolist() == [2.0] * 3
            buffer.fill(2)
        assert "versioned" in repr(buffer.__dlpack__(dl_device=(1, 0), max_version=(1, 0)))
        with pytest.raises(InvalidValueError, match="copy is False, but dl_device is"):
            buffer.__dlpack__(dl_device=(1, 0), copy=False)
        with pytest.raises(InvalidValueError, match="stream is 'x': host memory has none"):
            buffer.__dlpack__(dl_device=(1, 0), stream="x")
        with pytest.raises(InvalidValueError, match=r"view\('i8'\)"):
            buffer.view("M8[s]").__dlpack__(dl_device=(1, 0))
        with pytest.raises(ringmem.NotSupportedError, match="to_numpy"):
            buffer.__dlpack__(copy=True)
        del array
        assert _native.buffer_uses(buffer) == 0
        buffer.close()


def test_a_copy_of_a_buffer_of_a_closed_stream_says_what_does(device):
    stream = device.create_stream()
    buffer = ringmem.full(3, 2.0, device=device, stream=stream)
    stream.synchronize()
    stream.close()
    with pytest.raises(ringmem.ClosedError, match=r"give buffer.copy\(stream=…\)"):
        np.from_dlpack(buffer, copy=True)
    assert np.from_dlpack(buffer.copy(stream=0)).tolist() == [2.0] * 3


# --- importing -----------------------------------------------------------------------------------


def test_importing_shares_memory_both_ways(device):
    array = np.arange(12, dtype="f4").reshape(3, 4)
    buffer = ringmem.from_dlpack(array)
    assert (buffer.ptr, buffer.shape, buffer.dtype) == (array.ctypes.data, (3, 4), array.dtype)
    buffer[1].fill(-1)
    assert (array[1] == -1).all()
    array[2] = 7
    assert (buffer.to_numpy()[2] == 7).all()
    assert "borrowed" in repr(buffer)


def test_importing_to_a_device_copies_unless_forbidden(device, other):
    array = np.arange(4)
    for options in ({"device": other}, {"copy": True}, {"device": device, "copy": True}):
        buffer = ringmem.from_dlpack(array, **options)
        assert buffer.ptr != array.ctypes.data
        assert buffer.device is options.get("device", device)
        assert buffer.to_numpy().tolist() == [0, 1, 2, 3]
    with pytest.raises(InvalidValueError, match="copy is False"):
        ringmem.from_dlpack(array, device=other, copy=False)
    assert ringmem.from_dlpack(array, device=device, copy=False).ptr == array.ctypes.data


def test_strided_tensors_are_refused_with_a_remedy(device):
    with pytest.raises(InvalidValueError, match="contiguous"):
        ringmem.from_dlpack(np.zeros((4, 4))[:, ::2])
    assert ringmem.from_dlpack(np.zeros((4, 1, 4))[::1]).shape == (4, 1, 4)


def test_objects_without_dlpack_are_refused(device):
    for nonsense in (3, [1, 2], b"abc", None):
        with pytest.raises(InvalidValueError, match="has no __dlpack__"):
            ringmem.from_dlpack(nonsense)


def test_the_stream_of_host_memory_is_one_of_its_device(device, other):
    array = np.arange(4)
    stream = device.create_stream()
    for make in (ringmem.from_dlpack, ringmem.as_buffer):
        assert make(array, stream=stream).stream is stream
        with pytest.raises(InvalidValueError, match="stream is 'x'"):
            make(array, stream="x")
        with pytest.raises(ringmem.InvalidDeviceError, match="cpu:1"):
            make(array, stream=other.create_stream())


class Producer:
    """A producer of before DLPack 1.0, or on a device that nobody knows."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, stream=None):
        assert stream is None
        return None if self.array is None else self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.device


def test_legacy_producers_are_read(device):
    array = np.arange(5)
    assert ringmem.from_dlpack(Producer(array)).ptr == array.ctypes.data


def test_unknown_device_types_are_refused(device):
    with pytest.raises(InvalidValueError, match="device type 10"):
        ringmem.from_dlpack(Producer(np.arange(5), (10, 0)))


def test_what_is_no_answer_of_the_protocol_is_refused(device):
    with pytest.raises(InvalidValueError, match=r"__dlpack__\(\) gave None: a fresh capsule"):
        ringmem.from_dlpack(Producer(None))
    for nonsense in (None, (1,), 5):
        with pytest.raises(InvalidValueError, match=r"__dlpack_device__\(\) is .* two integers"):
            ringmem.from_dlpack(Producer(np.arange(5), nonsense))


def test_a_cuda_tensor_without_a_driver_says_so(device):
    if not _native.cuda_driver().load_error:
        pytest.skip("there is a CUDA driver")
    with pytest.raises(ringmem.NotInitializedError):
        ringmem.from_dlpack(Producer(np.arange(5), (2, 0)))


def test_the_owner_is_kept_until_close(device):
    buffer = ringmem.from_dlpack(np.full(1000, 3))
    gc.collect()
    view = buffer[1:3]
    assert view.to_numpy().tolist() == [3, 3]


def test_torch_shares_memory_both_ways(device):
    torch = pytest.importorskip("torch")
    buffer = ringmem.full(4, 2, "f4", device=device)
    tensor = torch.from_dlpack(buffer)
    tensor += 1
    assert buffer.to_numpy().tolist() == [3] * 4
    assert ringmem.from_dlpack(tensor).to_numpy().tolist() == [3] * 4
