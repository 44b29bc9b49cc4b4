"""Fills and copies between buffers, arrays, devices and drivers."""

import array as stdlib_array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringmem
from ringmem.native import _native

KINDS = [ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("make_other", KINDS)
def test_every_kind_copies_to_every_kind(device, make, make_other):
    source, target = make((3, 4), "i8", device=device), make_other((3, 4), "i8", device=device)
    expected = np.arange(12).reshape(3, 4)
    source.copy_from(expected)
    source.copy_to(target)
    assert target.to_numpy().tolist() == expected.tolist()
    target.fill(-1)
    target.copy_from(source[:])
    assert target.to_numpy().tolist() == expected.tolist()


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("u1", 200), ("i1", -1), ("?", True), ("u2", 513), ("f2", 0.1), ("i4", -7), ("f4", 0.1),
        ("f8", 0.1), ("i8", -2), ("u8", (1 << 63) + 1), ("c16", 1 + 2j), ("S5", b"abc"),
        ("U2", "éa"), ("V3", b"xyz"), ("M8[ns]", np.datetime64(5, "ns")), (">i4", 77),
        ("bfloat16", 1.5), ([("a", "u1"), ("b", "f8")], (3, 0.25)), ("V100", b"0123456789" * 10),
        ("V4099", bytes(range(256)) * 16 + b"abc"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 7])
def test_fill_sets_every_element_of_any_dtype(device, make, dtype, value, size):
    with make(size, dtype, device=device) as buffer:
        expected = np.empty(size, buffer.dtype)
        expected[:] = np.array(value, buffer.dtype)
        buffer.fill(value)
        assert buffer.to_numpy().tobytes() == expected.tobytes()


@given(
    itemsize=st.integers(1, 40), offset=st.integers(0, 9), size=st.integers(1, 40), data=st.data()
)
@settings(max_examples=100, deadline=None)
def test_fill_stays_within_a_view_at_any_alignment(itemsize, offset, size, data):
    pattern = data.draw(st.binary(min_size=itemsize, max_size=itemsize))
    with ringmem.zeros(600 * 4, "u1", device="cpu") as whole:
        part = whole[offset : offset + size * itemsize].view(f"V{itemsize}")
        part.fill(np.void(pattern))
        expected = bytes(offset) + pattern * size
        assert whole.to_numpy().tobytes() == expected.ljust(2400, b"\0")
        part.close()


def test_fill_uses_as_few_driver_calls_as_the_pattern_allows(faulty):
    device = ringmem.devices_of(faulty)[0]
    with ringmem.zeros(1024, "f8", device=device) as buffer:
        for value, fills, copies in ((0.0, 1, 0), (float("nan"), 2, 10)):
            before = faulty.calls
            buffer.fill(value)
            after = faulty.calls
            assert after["fill_async"] - before["fill_async"] == fills
            assert after["copy_async"] - before["copy_async"] == copies


@pytest.mark.parametrize("peers", [True, False])
def test_copies_between_devices(peers):
    with ringmem.simulate(devices=2, peers=peers) as simulation:
        a, b = simulation.devices
        source = ringmem.from_array(np.arange(1000), device=a)
        target = ringmem.empty(1000, "i8", device=b)
        target.copy_from(source)
        assert target.to_numpy().tolist() == list(range(1000))
        for stream in (a.create_stream(), b.create_stream()):
            target.fill(0)
            target.stream.synchronize()
            source.copy_to(target, stream)
            assert (0, stream.handle) in _native.buffer_streams_in_use(source) or b is stream.device
            assert target.to_numpy().tolist() == list(range(1000))
        stream.close()
        assert _native.flush_reaper(10)


def test_a_copy_between_devices_comes_after_the_work_of_both_and_before_their_next():
    with ringmem.simulate(devices=2, latency_s=0.03) as simulation:
        a, b = simulation.devices
        source = ringmem.full(1000, 1, "i4", stream=a.create_stream())
        target = ringmem.full(1000, 2, "i4", stream=b.create_stream())
        target.copy_from(source)
        source.fill(3)
        assert (target.to_numpy() == 1).all()


def test_copies_between_drivers(device):
    with ringmem.simulate(capacity="64 MiB", strict=True) as elsewhere:
        foreign = elsewhere.devices[0]
        expected = np.arange(100, dtype="f4")
        for make in KINDS:
            for make_other in KINDS:
                source = make(100, "f4", device=device)
                target = make_other(100, "f4", device=foreign)
                source.copy_from(expected)
                source.copy_to(target)
                assert target.to_numpy().tolist() == expected.tolist()
                source.fill(0)
                source.copy_from(target)
                assert source.to_numpy().tolist() == expected.tolist()


def test_pinned_memory_of_one_device_serves_another(device, other):
    pinned = ringmem.PinnedBuffer(10, "i4", device=device)
    pinned.fill(4)
    target = ringmem.empty(10, "i4", device=other)
    pinned.stream.synchronize()
    pinned.copy_to(target)
    assert target.to_numpy().tolist() == [4] * 10
    pinned.close()


@pytest.mark.parametrize(
    "holder",
    [
        bytearray(b"\1\2\3\4"),
        memoryview(bytearray(b"\1\2\3\4")),
        stdlib_array.array("B", [1, 2, 3, 4]),
        np.array([1, 2, 3, 4], "u1"),
    ],
    ids=lambda holder: type(holder).__name__,
)
def test_the_buffer_protocol_is_a_source_and_a_target(device, holder):
    buffer = ringmem.empty(4, "u1", device=device)
    buffer.copy_from(holder)
    assert buffer.to_numpy().tolist() == [1, 2, 3, 4]
    buffer.fill(9)
    buffer.copy_to(holder)
    assert bytes(holder) == b"\t\t\t\t"


def test_bytes_are_a_source_but_no_target(device):
    buffer = ringmem.empty(2, "u1", device=device)
    buffer.copy_from(b"ab")
    assert buffer.to_numpy().tobytes() == b"ab"
    with pytest.raises(ringmem.InvalidValueError, match="read-only"):
        buffer.copy_to(b"cd")


def test_datetimes_copy_both_ways(device):
    times = np.array(["2020-01-01", "NaT"], "M8[s]")
    buffer = ringmem.from_array(times, device=device)
    out = np.empty_like(times)
    buffer.copy_to(out)
    assert out.tobytes() == times.tobytes()


def test_an_object_with_dlpack_only_is_a_source_and_a_target(device):
    class Tensor:
        def __init__(self):
            self.data = np.arange(5, dtype="f4")

        def __dlpack__(self, **options):
            return self.data.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.data.__dlpack_device__()

    tensor = Tensor()
    buffer = ringmem.empty(5, "f4", device=device)
    buffer.copy_from(tensor)
    assert buffer.to_numpy().tolist() == [0, 1, 2, 3, 4]
    buffer.fill(8)
    buffer.copy_to(tensor)
    assert tensor.data.tolist() == [8] * 5
