"""The plan for strided host arrays, and copies that follow it."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringmem
from ringmem.buffers.strided import plan_strided
from ringmem.native import _native


def follow(plan, array):
    """Do what a plan says with plain memory copies, into packed bytes."""
    base = array.__array_interface__["data"][0]
    packed = bytearray(array.nbytes)

    def read(ptr, nbytes):
        return bytes((ctypes.c_char * nbytes).from_address(ptr))

    if plan.contiguous:
        packed[:] = read(base, array.nbytes)
    for rows in plan.rows:
        for i in range(rows.height):
            at = rows.packed_offset + i * rows.width
            packed[at : at + rows.width] = read(
                base + rows.host_offset + i * rows.pitch, rows.width
            )
    return bytes(packed)


@st.composite
def strided_arrays(draw):
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(1, 6)) for _ in range(ndim))
    dtype = draw(st.sampled_from(["u1", "f4", "c16", "V48"]))
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3, -1])) for _ in shape]
    big = tuple(n * abs(step) for n, step in zip(shape, steps, strict=True))
    raw = np.frombuffer(
        np.random.default_rng(draw(st.integers(0, 99))).bytes(
            int(np.prod(big)) * np.dtype(dtype).itemsize
        ),
        dtype,
    ).copy()
    array = raw.reshape(big)[(..., *(slice(None, None, step) for step in steps))]
    order = draw(st.permutations(range(ndim)))
    return array.transpose(order)


@given(strided_arrays())
def test_a_plan_that_is_not_staged_copies_every_byte_to_its_place(array):
    plan = plan_strided(array.shape, array.strides, array.itemsize)
    if not plan.staged:
        assert follow(plan, array) == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous", "calls"),
    [
        ((4, 8, 16), (512, 64, 4), True, 0),
        ((1, 8), (999, 4), False, 0),
        ((4, 32), (256, 4), False, 1),
        ((3, 4, 32), (1024, 256, 4), False, 1),
        ((3, 4, 32), (5000, 256, 4), False, 3),
        ((65, 4, 32), (5000, 256, 4), False, 0),
        ((4, 8), (64, 4), False, 0),
        ((4, 32), (-256, 4), False, 0),
        ((4, 32), (0, 4), False, 0),
        ((4, 32), (4, 16), False, 0),
    ],
)
def test_plans_of_typical_arrays(shape, strides, contiguous, calls):
    plan = plan_strided(shape, strides, 4)
    if shape == (1, 8):
        contiguous = True  # an axis of one element has no stride
    assert plan.contiguous == contiguous
    assert len(plan.rows) == calls


@given(strided_arrays())
@settings(max_examples=100, deadline=None)
def test_strided_arrays_make_the_round_trip(array):
    with ringmem.empty(array.shape, array.dtype, device="cpu") as buffer:
        buffer.copy_from(array)
        assert buffer.to_numpy().tobytes() == np.ascontiguousarray(array).tobytes()
        target = np.zeros_like(array)
        spread = np.zeros((*(2 * n for n in array.shape),), array.dtype)
        holes = spread[(..., *(slice(None, None, 2) for _ in array.shape))]
        for out in (target, holes):
            buffer.copy_to(out)
            assert np.ascontiguousarray(out).tobytes() == np.ascontiguousarray(array).tobytes()
        written = sum(byte != 0 for byte in spread.tobytes())
        assert written == sum(byte != 0 for byte in holes.tobytes()), "bytes between were written"


def test_rows_of_a_pinned_array_go_as_one_pitched_copy(faulty):
    device = ringmem.devices_of(faulty)[0]
    with ringmem.PinnedBuffer((32, 64), "f4", device=device) as pinned:
        window = pinned.numpy()[:, :32]
        window[...] = np.arange(32)
        with ringmem.zeros((32, 32), "f4", device=device) as buffer:
            before = faulty.calls
            buffer.copy_from(window)
            buffer.copy_to(window)
            after = faulty.calls
            assert after["copy_2d_async"] - before["copy_2d_async"] == 2
            assert after["copy_async"] == before["copy_async"]
            assert after["stream_synchronize"] == before["stream_synchronize"]
            assert (buffer.to_numpy() == np.arange(32)).all()
        del window


def test_a_copy_from_pinned_memory_notes_the_use(slow):
    stream = slow.create_stream()
    pinned = ringmem.PinnedBuffer(1000, "f4", device=slow)
    pinned.numpy()[:] = 3
    buffer = ringmem.empty(1000, "f4", device=slow)
    buffer.copy_from(pinned.numpy(), stream)
    assert (slow.ordinal, stream.handle) in _native.buffer_streams_in_use(pinned)
