"""What must hold on a simulated device, on one that hides its memory, and on a GPU where there is
one: the same tests. With other libraries on a GPU: memory shared both ways.
"""

import numpy as np
import pytest

import ringmem
from ringmem.native import _native

KINDS = [ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer]


@pytest.fixture(params=["cpu", "strict", pytest.param("cuda", marks=pytest.mark.cuda)])
def place(request):
    if request.param == "cuda":
        found = ringmem.devices("cuda")
        if not found:
            pytest.skip("no CUDA device")
        return found[0]
    (device,) = ringmem.simulate(capacity="1 GiB", strict=request.param == "strict").devices
    return device


@pytest.fixture
def gpu():
    found = ringmem.devices("cuda")
    if not found:
        pytest.skip("no CUDA device")
    return found[0]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", "c16", "V24", "M8[s]", "bfloat16"])
def test_fill_and_both_directions(place, make, dtype):
    rng = np.random.default_rng(3)
    with make((37, 11), dtype, device=place, stream=place.create_stream()) as buffer:
        array = np.frombuffer(rng.bytes(buffer.nbytes), buffer.dtype).reshape(37, 11)
        buffer.copy_from(array)
        assert buffer.to_numpy().tobytes() == array.tobytes()
        buffer[1:3].fill(array[0, 0])
        expected = array.copy()
        expected[1:3] = array[0, 0]
        assert buffer.to_numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("make", KINDS)
def test_strided_arrays_on_either_side(place, make):
    wide = np.random.default_rng(4).integers(0, 99, (64, 300), "i4")
    for part in (wide[:, :100], wide[::3], wide[:, ::7], wide.T, wide[::-1]):
        with make(part.shape, "i4", device=place) as buffer:
            buffer.copy_from(part)
            target = np.zeros((part.shape[0] * 2, part.shape[1] * 3), "i4")[::2, ::3]
            buffer.copy_to(target)
            assert (target == part).all()


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("make_other", KINDS)
def test_copies_between_kinds_on_one_stream(place, make, make_other):
    stream = place.create_stream()
    source = make(100_000, "f4", stream=stream)
    target = make_other(100_000, "f4", stream=stream)
    source.fill(1.25)
    target.copy_from(source)
    source.fill(0)
    assert (target.to_numpy() == 1.25).all()


def test_pinned_rows_go_up_and_down_asynchronously(place):
    stream = place.create_stream()
    pinned = ringmem.PinnedBuffer((256, 512), "f4", device=place)
    window = pinned.numpy()[:, :128]
    window[...] = np.arange(128)
    with ringmem.zeros((256, 128), "f4", stream=stream) as buffer:
        buffer.copy_from(window)
        stream.synchronize()
        window[...] = 0
        buffer.copy_to(window)
        stream.synchronize()
        assert (window == np.arange(128)).all()


def test_memory_that_exists_is_pinned_and_given_back(place):
    array = np.arange(1 << 20, dtype="i4")
    for _ in range(2):
        with ringmem.pin(array, device=place) as buffer:
            device = ringmem.empty(array.shape, "i4", device=place)
            device.copy_from(buffer)
            assert (device.to_numpy() == array).all()
        assert _native.flush_reaper(30)


def test_managed_memory_takes_turns(place):
    stream = place.create_stream()
    with ringmem.UnifiedBuffer(1000, "i4", stream=stream) as buffer:
        buffer.fill(3)
        with buffer.host() as window:
            assert (window == 3).all()
            window[:] = np.arange(1000)
        del window
        if place.capabilities.concurrent_managed_access:
            buffer.advise("set_preferred_location")
            buffer.prefetch("host")
            buffer.prefetch()
        assert (buffer.to_numpy() == np.arange(1000)).all()


def test_pinned_memory_is_read_by_numpy_through_dlpack(place):
    buffer = ringmem.PinnedBuffer(10, "f4", device=place)
    buffer.fill(2)
    assert np.from_dlpack(buffer).tolist() == [2.0] * 10


def test_device_memory_reaches_the_host_as_a_copy(place):
    buffer = ringmem.full(10, 2, "f4", device=place)
    if place.host_accessible:
        assert np.asarray(buffer).tolist() == [2.0] * 10
        return
    with pytest.raises(ringmem.NotSupportedError, match="to_numpy"):
        np.asarray(buffer)
    if place.platform == "cuda":
        assert np.from_dlpack(buffer, device="cpu").tolist() == [2.0] * 10


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_the_array_interface_makes_the_round_trip(gpu):
    stream = gpu.create_stream()
    for make in KINDS:
        buffer = make((3, 4), "f4", stream=stream)
        buffer.fill(5)
        assert buffer.__cuda_array_interface__["stream"] == stream.handle
        interface = buffer.__cuda_array_interface__
        foreign = type("Foreign", (), {"__cuda_array_interface__": interface, "keep": buffer})()
        borrowed = ringmem.as_buffer(foreign)
        assert type(borrowed) is make
        assert (borrowed.to_numpy() == 5).all()


@pytest.mark.cuda
def test_torch_shares_gpu_memory_both_ways(gpu):
    torch = pytest.importorskip("torch")
    buffer = ringmem.full(1000, 2, "f4", device=gpu, stream=gpu.create_stream())
    tensor = torch.from_dlpack(buffer)
    assert (tensor.data_ptr(), tensor.device.type) == (buffer.ptr, "cuda")
    tensor += 1
    torch.cuda.synchronize()
    assert (buffer.to_numpy() == 3).all()
    for borrowed in (ringmem.from_dlpack(tensor), ringmem.as_buffer(tensor)):
        assert borrowed.ptr == tensor.data_ptr()
        assert (borrowed.to_numpy() == 3).all()
    assert torch.as_tensor(buffer, device="cuda").data_ptr() == buffer.ptr


@pytest.mark.cuda
def test_cupy_shares_gpu_memory_both_ways(gpu):
    cupy = pytest.importorskip("cupy")
    buffer = ringmem.full(1000, 2, "f4", device=gpu, stream=gpu.create_stream())
    for array in (cupy.from_dlpack(buffer), cupy.asarray(buffer)):
        assert array.data.ptr == buffer.ptr
    array += 1
    cupy.cuda.runtime.deviceSynchronize()
    assert (buffer.to_numpy() == 3).all()
    for borrowed in (ringmem.from_dlpack(array), ringmem.as_buffer(array)):
        assert (borrowed.to_numpy() == 3).all()
