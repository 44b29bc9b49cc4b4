"""Slices, dtypes and shapes that share memory."""

import gc
import weakref

import numpy as np
import pytest

import ringmem
from ringmem.native import _native


@pytest.fixture
def buffer(device):
    return ringmem.from_array(np.arange(24, dtype="i4").reshape(4, 3, 2), device=device)


@pytest.mark.parametrize(
    "index",
    [slice(1, 3), slice(None), slice(3, 1), slice(-2, None), slice(0, 100), 0, -1, 3, ...,
     slice(2, 3, 5), np.int64(2), (slice(1, 2),), ()],
    ids=str,
)  # fmt: skip
def test_indexing_the_first_axis_is_numpys(buffer, index):
    expected = buffer.to_numpy()[index]
    view = buffer[index]
    assert view.is_view
    assert view.shape == expected.shape
    assert view.to_numpy().tolist() == expected.tolist()


def test_iterating_gives_the_rows(buffer):
    assert [row.to_numpy().tolist() for row in buffer] == buffer.to_numpy().tolist()
    assert len(buffer) == 4


def test_writing_to_a_view_writes_to_the_buffer(buffer):
    buffer[1].fill(-1)
    buffer[3][2][1].fill(-2)
    array = buffer.to_numpy()
    assert (array[1] == -1).all()
    assert array[3, 2, 1] == -2
    assert array[0].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", "V8", [("a", "i4"), ("b", "f4")]])
def test_another_dtype_is_numpys_view(buffer, dtype):
    expected = buffer.to_numpy().view(dtype)
    view = buffer.view(dtype)
    assert view.shape == expected.shape
    assert view.to_numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(24,), (2, 12), (-1, 4), (2, -1, 3), [6, 4], (-1,)])
def test_reshape_is_numpys(buffer, shape):
    expected = buffer.to_numpy().reshape(shape)
    assert buffer.reshape(shape).to_numpy().tolist() == expected.tolist()
    assert buffer.reshape(*shape).shape == expected.shape


def test_capacity_of_a_view_reaches_to_the_end_of_the_memory(buffer):
    assert buffer.capacity == 24
    assert buffer[1:2].size == 6
    assert buffer[1:2].capacity == 18
    assert buffer[1:2].view("u1").capacity == 72


def test_a_view_keeps_the_memory_after_its_parents_are_gone(device):
    buffer = ringmem.full(6, 7, "i4", device=device)
    view = buffer[2:][1:3]
    gone = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert gone() is not None
    assert view.to_numpy().tolist() == [7, 7]
    del view
    gc.collect()
    assert gone() is None


def test_a_closed_view_lets_go_of_the_buffer(buffer):
    view = buffer[:1]
    inner = view[:1]
    assert _native.buffer_uses(buffer) == 2
    view.close()
    assert inner.to_numpy().shape == (1, 3, 2)
    inner.close()
    inner.close()
    assert _native.buffer_uses(buffer) == 0
    buffer.close()


def test_views_have_the_stream_and_device_of_their_buffer(device):
    stream = device.create_stream()
    view = ringmem.empty(3, "f4", stream=stream)[1:]
    assert view.stream is stream
    assert view.device is device
