"""Copies between devices: planned apart from the act, right on every way, and undone in part."""

import ctypes
import threading

import numpy as np
import pytest

import ringmem
from ringmem.device.peer_copy import CopyRoute, plan_copy
from ringmem.device.staging import CHUNK_NBYTES
from ringmem.native import _native

MIB = 1 << 20


def put(device, data):
    """Return device memory that holds `data`."""
    ptr = device.driver.mem_alloc(device.ordinal, data.nbytes)
    device.driver.copy_async(device.ordinal, ptr, data.ctypes.data, data.nbytes, 0)
    device.default_stream.synchronize(timeout_s=30)
    return ptr


def get(device, ptr, nbytes):
    data = np.zeros(nbytes, np.uint8)
    device.driver.copy_async(device.ordinal, data.ctypes.data, ptr, nbytes, 0)
    device.default_stream.synchronize(timeout_s=30)
    return data


def pattern(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


# --- the plan ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dst", "src", "linked", "same_driver", "route"),
    [
        ("cpu:0", "cpu:0", True, True, CopyRoute.LOCAL),
        ("cpu:0", "cpu:1", True, True, CopyRoute.PEER),
        ("cpu:0", "cpu:1", False, True, CopyRoute.STAGED),
        ("cpu:0", "cuda:0", False, False, CopyRoute.STAGED_BLOCKING),
        ("cpu:0", "cpu:0", False, False, CopyRoute.STAGED_BLOCKING),  # of two drivers
    ],
)
def test_the_plan_picks_the_shortest_way(dst, src, linked, same_driver, route):
    plan = plan_copy(dst, src, 1000, linked=linked, same_driver=same_driver)
    assert plan.route is route
    assert list(plan.chunks) == [(0, 1000)]
    assert dst in plan.reason


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 128, 1000])
def test_the_chunks_of_a_plan_cover_the_range_once(nbytes):
    plan = plan_copy("a", "b", nbytes, linked=False, same_driver=True, chunk_nbytes=64)
    ends = [0]
    for offset, length in plan.chunks:
        assert offset == ends[-1]
        assert 1 <= length <= 64
        ends.append(offset + length)
    assert ends[-1] == nbytes
    assert len(plan.chunks) == len(ends) - 1
    assert [plan.chunks[i] for i in range(len(plan.chunks))] == list(plan.chunks)
    assert plan.chunks[1:] == tuple(plan.chunks)[1:]
    with pytest.raises(IndexError):
        plan.chunks[len(plan.chunks)]


def test_a_plan_of_any_size_makes_no_chunk_before_it_is_asked_for():
    plan = plan_copy("a", "b", 1 << 63, linked=False, same_driver=True)
    assert len(plan.chunks) == (1 << 63) // CHUNK_NBYTES
    assert plan.chunks[-1] == ((1 << 63) - CHUNK_NBYTES, CHUNK_NBYTES)


# --- the act -----------------------------------------------------------------------------------

SIZES = [1, 4096, CHUNK_NBYTES, CHUNK_NBYTES + 1, 3 * CHUNK_NBYTES + 17]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("stream_of", [0, 1])
def test_copies_arrive_whole_in_stream_order(nbytes, peers, stream_of):
    devices = a, b = ringmem.simulate(devices=2, peers=peers, latency_s=0.002).devices
    data = pattern(nbytes)
    src, dst = put(a, data), put(b, np.zeros(nbytes, np.uint8))
    stream = devices[stream_of].create_stream()
    result = ringmem.copy_peer(dst, b, src, a, nbytes, stream)
    stream.synchronize(timeout_s=30)
    assert np.array_equal(get(b, dst, nbytes), data)
    assert result.nbytes == nbytes
    assert result.staged is not peers
    assert not result.blocked
    assert result.chunks == (1 if peers else -(-nbytes // CHUNK_NBYTES))


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("stream_of", [0, 1])
def test_copies_between_drivers_are_complete_on_return(nbytes, stream_of):
    a = ringmem.simulate(latency_s=0.002).devices[0]
    b = ringmem.simulate(latency_s=0.001).devices[0]
    data = pattern(nbytes)
    src, dst = put(a, data), put(b, np.zeros(nbytes, np.uint8))
    stream = (a, b)[stream_of].create_stream()
    result = ringmem.copy_peer(dst, b, src, a, nbytes, stream)
    assert np.array_equal(get(b, dst, nbytes), data)
    assert result.route is CopyRoute.STAGED_BLOCKING
    assert result.staged
    assert result.blocked
    assert "different drivers" in result.reason


def test_a_copy_within_a_device_is_local(device):
    data = pattern(4096)
    src, dst = put(device, data), put(device, np.zeros(4096, np.uint8))
    result = ringmem.copy_peer(dst, device, src, device, 4096)
    device.default_stream.synchronize(timeout_s=10)
    assert result.route is CopyRoute.LOCAL
    assert not result.staged
    assert np.array_equal(get(device, dst, 4096), data)


@pytest.mark.parametrize("stream_of", [0, 1])
def test_a_staged_copy_waits_for_earlier_work_and_later_work_for_it(stream_of):
    devices = a, b = ringmem.simulate(devices=2, peers=False, latency_s=0.2).devices
    src, dst = put(a, np.zeros(4096, np.uint8)), put(b, np.zeros(4096, np.uint8))
    stream = devices[stream_of].create_stream()
    producer, consumer = a.create_stream(), b.create_stream()
    a.driver.fill_async(0, src, 0x55, 1, 4096, producer.handle)
    stream.wait(producer)
    ringmem.copy_peer(dst, b, src, a, 4096, stream)
    consumer.wait(stream)
    out = b.driver.host_alloc(1, 4096)
    b.driver.copy_async(1, out, dst, 4096, consumer.handle)
    assert not producer.query()  # nothing so far waited on the host
    consumer.synchronize(timeout_s=30)
    assert ctypes.string_at(out, 4096) == b"\x55" * 4096


def test_the_current_stream_of_the_destination_is_the_default(pair):
    a, b = pair
    data = pattern(64)
    src, dst = put(a, data), put(b, np.zeros(64, np.uint8))
    with b.create_stream() as stream:
        ringmem.copy_peer(dst, b, src, a, 64)
        stream.synchronize(timeout_s=10)
    assert np.array_equal(get(b, dst, 64), data)


def test_the_staging_pair_is_kept_and_nothing_is_freed_on_the_way():
    driver = _native.FaultyDriver(_native.HostDriver("devices=2,peers=none,capacity=256MiB"))
    a, b = ringmem.devices_of(driver)
    data = pattern(3 * CHUNK_NBYTES)
    src, dst = put(a, data), put(b, np.zeros(data.nbytes, np.uint8))
    for _ in range(3):
        ringmem.copy_peer(dst, b, src, a, data.nbytes)
        b.default_stream.synchronize(timeout_s=30)
    assert driver.calls["host_alloc"] == 2
    assert driver.calls["stream_create"] == 2
    for operation in ("host_free", "mem_free", "synchronize", "stream_synchronize"):
        assert driver.calls[operation] == 0, operation
    ringmem.release_staging(a, b)
    driver.mem_free(0, src)
    driver.mem_free(1, dst)
    assert not any(driver.live.values())


def test_copies_at_once_between_the_same_devices_do_not_mix():
    a, b = ringmem.simulate(devices=2, peers=False, latency_s=0.001).devices
    nbytes = 2 * CHUNK_NBYTES + 5
    wanted = [pattern(nbytes, seed) for seed in range(4)]
    sources = [put(a, data) for data in wanted]
    targets = [put(b, np.zeros(nbytes, np.uint8)) for _ in wanted]
    failures = []

    def copy(i):
        try:
            stream = b.create_stream()
            for _ in range(3):
                ringmem.copy_peer(targets[i], b, sources[i], a, nbytes, stream)
            stream.synchronize(timeout_s=60)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=copy, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for target, data in zip(targets, wanted, strict=True):
        assert np.array_equal(get(b, target, nbytes), data)


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dst", "src", "nbytes", "named"),
    [
        (0, 4096, 64, "dst_ptr is 0x0"),
        (4096, 0, 64, "src_ptr is 0x0"),
        (-1, 4096, 64, "dst_ptr is -0x1"),
        (4096, 4096, 0, "nbytes is 0"),
        (4096, 4096, -5, "nbytes is -5"),
        ((1 << 64) - 8, 4096, 64, "dst_ptr is 0x"),
        ("x", 4096, 64, "dst_ptr is 'x': give an integer"),
        (4096, 1.5, 64, "src_ptr is 1.5: give an integer"),
        (4096, 4096, "64", "nbytes is '64': give an integer"),
    ],
)
def test_ranges_that_make_no_sense_never_reach_the_driver(pair, dst, src, nbytes, named):
    with pytest.raises(ringmem.InvalidValueError, match=named):
        ringmem.copy_peer(dst, pair[0], src, pair[1], nbytes)


def test_names_and_integers_of_numpy_will_do(pair):
    data = pattern(64)
    src, dst = put(pair[0], data), put(pair[1], np.zeros(64, np.uint8))
    result = ringmem.copy_peer(np.uint64(dst), "cpu:1", np.uint64(src), "cpu", np.int32(64))
    assert type(result.nbytes) is int
    assert (get(pair[1], dst, 64) == data).all()
    with pytest.raises(ringmem.InvalidValueError, match="src_device is 3"):
        ringmem.copy_peer(dst, "cpu:1", src, 3, 64)


def test_a_stream_of_another_driver_is_refused_as_one(pair):
    stranger = ringmem.simulate().devices[0]
    with pytest.raises(ringmem.InvalidDeviceError, match=r"cpu:0 of another driver .* or cpu:1$"):
        ringmem.copy_peer(4096, pair[0], 4096, pair[1], 64, stranger.create_stream())


def test_a_stream_of_a_third_device_is_refused():
    a, b, c = ringmem.simulate(devices=3).devices
    third = c.create_stream()
    for stream in (third, third.handle):
        with pytest.raises(ringmem.InvalidDeviceError, match="cpu:2"):
            ringmem.copy_peer(4096, a, 4096, b, 64, stream)


def test_a_closed_stream_is_refused(pair):
    stream = pair[0].create_stream()
    stream.close()
    with pytest.raises(ringmem.ClosedError):
        ringmem.copy_peer(4096, pair[0], 4096, pair[1], 64, stream)


@pytest.mark.parametrize("distance", [1, -1, 8, -8, 0])
def test_ranges_that_overlap_are_refused_by_name(device, distance):
    data = pattern(32)
    ptr = put(device, data)
    src, dst = ptr + 16, ptr + 16 + distance
    with pytest.raises(ringmem.InvalidValueError, match=f"dst_ptr is {dst:#x} and src_ptr is"):
        ringmem.copy_peer(dst, device, src, device, 9)
    assert np.array_equal(get(device, ptr, 32), data)


@pytest.mark.parametrize("distance", [9, -9, 10])
def test_ranges_that_touch_are_copied(device, distance):
    data = pattern(64)
    ptr = put(device, data)
    ringmem.copy_peer(ptr + 20 + distance, device, ptr + 20, device, 9)
    expected = data.copy()
    expected[20 + distance : 29 + distance] = data[20:29]
    assert np.array_equal(get(device, ptr, 64), expected)


def test_no_bytes_are_refused_wherever_the_ranges_are(device):
    ptr = put(device, pattern(64))
    for src in (ptr, ptr + 32):
        with pytest.raises(ringmem.InvalidValueError, match="nbytes is 0: copy at least one"):
            ringmem.copy_peer(ptr, device, src, device, 0)


@pytest.mark.parametrize("nbytes", [1 << 80, 1 << 64, 1 << 63, (1 << 63) - 1, 1 << 45])
@pytest.mark.parametrize("peers", [True, False])
def test_more_than_there_can_be_is_refused_and_the_device_stays_usable(peers, nbytes):
    a, b = ringmem.simulate(devices=2, peers=peers, capacity="64 MiB").devices
    data = pattern(64)
    src, dst = put(a, data), put(b, np.zeros(64, np.uint8))
    for ends in ((dst, b, src, a), (src, a, dst, a)):
        with pytest.raises(ringmem.InvalidValueError, match=f"nbytes is {nbytes}: cpu:"):
            ringmem.copy_peer(*ends, nbytes)
    ringmem.copy_peer(dst, b, src, a, 64)
    assert np.array_equal(get(b, dst, 64), data)


@pytest.mark.parametrize("large", [0, 1])
def test_the_smaller_device_bounds_a_copy_whichever_end_it_is(large, monkeypatch):
    monkeypatch.setattr("ringmem.device.peer_copy._host_nbytes", lambda: 1 << 20)
    ends = [ringmem.simulate(capacity="64 MiB").devices[0] for _ in range(2)]
    ends[large] = ringmem.simulate(capacity="16 TiB", name="large").devices[0]
    with pytest.raises(ringmem.InvalidValueError, match="65 MiB of memory together"):
        ringmem.copy_peer(4096, ends[0], 1 << 40, ends[1], (65 << 20) + 1)


def test_the_size_of_the_memory_is_asked_once():
    driver = _native.FaultyDriver(_native.HostDriver("devices=2,capacity=64MiB"))
    a, b = ringmem.devices_of(driver)
    src, dst = put(a, pattern(64)), put(b, pattern(64))
    for _ in range(3):
        ringmem.copy_peer(dst, b, src, a, 64)
    assert driver.calls["memory_info"] == 2


# --- faults ------------------------------------------------------------------------------------

OPERATIONS = [
    "host_alloc",
    "stream_create",
    "event_create",
    "event_record",
    "stream_wait_event",
    "copy_async",
]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_staged_copy_that_fails_anywhere_leaves_nothing_behind(operation, when):
    driver = _native.FaultyDriver(_native.HostDriver("devices=2,peers=none,capacity=64MiB"))
    a, b = ringmem.devices_of(driver)
    nbytes = 2 * CHUNK_NBYTES + 1
    data = pattern(nbytes)
    src, dst = put(a, data), put(b, np.zeros(nbytes, np.uint8))
    stream = b.create_stream()
    failures = 0
    for nth in range(1, 40):
        ringmem.release_staging(a, b)
        driver.clear()
        driver.fail(operation, nth=nth, when=when)
        try:
            ringmem.copy_peer(dst, b, src, a, nbytes, stream)
        except ringmem.DriverError:
            failures += 1
        else:
            break
    assert failures >= 2
    assert driver.pending == 1
    driver.clear()
    stream.synchronize(timeout_s=30)
    assert np.array_equal(get(b, dst, nbytes), data)
    ringmem.release_staging(a, b)
    stream.close()
    del stream  # with it goes the event behind its last work
    driver.mem_free(0, src)
    driver.mem_free(1, dst)
    assert {kind: count for kind, count in driver.live.items() if count} == {}


@pytest.mark.parametrize("operation", ["copy_async", "event_synchronize", "stream_synchronize"])
def test_a_copy_between_drivers_that_fails_leaves_nothing_behind(operation):
    drivers = [_native.FaultyDriver(_native.HostDriver("capacity=64MiB")) for _ in range(2)]
    (a,), (b,) = map(ringmem.devices_of, drivers)
    nbytes = 3 * CHUNK_NBYTES
    src, dst = put(a, pattern(nbytes)), put(b, np.zeros(nbytes, np.uint8))
    for driver in drivers:
        for nth in (1, 2):
            driver.fail(operation, nth=nth)
            try:
                ringmem.copy_peer(dst, b, src, a, nbytes)
            except ringmem.DriverError as error:
                assert error.operation  # noqa: PT017
            driver.clear()
    ringmem.copy_peer(dst, b, src, a, nbytes)
    assert np.array_equal(get(b, dst, nbytes), pattern(nbytes))
    ringmem.release_staging(a, b)
    drivers[0].mem_free(0, src)
    drivers[1].mem_free(0, dst)
    for driver in drivers:
        assert {kind: count for kind, count in driver.live.items() if count} == {}
