import gc
import threading
import time

import numpy as np
import pytest

import ringmem
from ringmem import (
    ClosedError,
    DriverError,
    InvalidValueError,
    NotSupportedError,
    OutOfMemoryError,
    devices_of,
    residency,
)
from ringmem.native import _native
from ringmem.virtual import AddressRange

from .conftest import PAGE, SIZES


def random_bytes(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)


def make(name, device, backup="host", **options):
    return residency.tag(name, backup, device, **{**SIZES, **options})


def test_bytes_and_addresses_come_back(device):
    data = [random_bytes(n, n) for n in (100, 5 * PAGE + 3, 40 * PAGE, 1)]
    with make("weights", device) as tag:
        buffers = [ringmem.from_array(x, device=device) for x in data]
    addresses = [buffer.ptr for buffer in buffers]
    free = device.memory_info().free
    assert tag.nbytes > 0
    for _ in range(3):
        residency.sleep("weights")
        assert tag.state == "asleep"
        assert tag.committed == 0
        assert device.memory_info().free > free
        assert tag.backup_nbytes >= sum(len(x) for x in data)
        residency.wake("weights")
        assert tag.state == "awake"
        assert tag.backup_nbytes == 0
        assert [buffer.ptr for buffer in buffers] == addresses
        for buffer, expected in zip(buffers, data, strict=True):
            assert np.array_equal(buffer.to_numpy(), expected)


def test_sleeping_memory_really_is_gone():
    device = devices_of(_native.HostDriver(f"granularity={PAGE}"))[0]
    tag = make("gone", device, "discard")
    buffer = ringmem.empty(PAGE, "uint8", device=device, allocator=tag)
    tag.sleep()
    assert device.memory_info().free == device.memory_info().total
    device.driver.fill_async(0, buffer.ptr, 1, 1, 16, 0)
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        device.synchronize()
    residency.registry._forget(tag)


def test_discard_keeps_addresses_only(device):
    tag = make("cache", device, "discard")
    buffer = ringmem.empty(20 * PAGE, "uint8", device=device, allocator=tag)
    before = buffer.ptr
    tag.sleep()
    assert tag.backup_nbytes == 0
    assert device.memory_info().free == device.memory_info().total
    tag.wake()
    assert buffer.ptr == before
    buffer.fill(3)
    assert np.all(buffer.to_numpy() == 3)


def test_keep_keeps_everything(device):
    tag = make("small", device, "keep")
    buffer = ringmem.from_array(random_bytes(100), device=device)
    kept = ringmem.empty(100, "uint8", device=device, allocator=tag)
    kept.copy_from(buffer)
    free = device.memory_info().free
    tag.sleep()
    assert tag.state == "asleep"
    assert device.memory_info().free == free
    assert np.array_equal(kept.to_numpy(), random_bytes(100))
    tag.wake()


def test_sleeping_memory_is_refused_by_name_and_the_device_lives_on(device):
    tag = make("weights", device)
    with tag:
        buffer = ringmem.from_array(np.arange(64, dtype="i4"), device=device)
    other = ringmem.DeviceBuffer(64, "i4", device=device)
    residency.sleep("weights")
    touches = [
        lambda: buffer.copy_to(other),
        lambda: buffer.copy_from(other),
        lambda: buffer.copy_from(np.zeros(64, "i4")),
        lambda: buffer.fill(0),
        lambda: buffer.to_numpy(),
        lambda: buffer[3:5].to_numpy(),
        lambda: buffer.numpy(),
        lambda: memoryview(buffer),
    ]
    for touch in touches:
        with pytest.raises((InvalidValueError, BufferError)) as refused:
            touch()
        said = refused.value.__cause__ or refused.value
        assert isinstance(said, InvalidValueError)
        assert "tag 'weights', is asleep" in str(said)
        assert "residency.wake('weights')" in str(said)
    assert buffer.ptr  # an address can be asked for
    residency.wake("weights")
    np.testing.assert_array_equal(buffer.to_numpy(), np.arange(64))


def test_only_named_tags_sleep(device):
    first, second = make("first", device), make("second", device, "discard")
    a = ringmem.empty(PAGE, "uint8", device=device, allocator=first)
    b = ringmem.empty(PAGE, "uint8", device=device, allocator=second)
    a.fill(1)
    residency.sleep("first")
    assert (first.state, second.state) == ("asleep", "awake")
    b.fill(2)
    residency.sleep()
    assert second.state == "asleep"
    residency.wake(["second", first])
    assert (first.state, second.state) == ("awake", "awake")
    assert np.all(a.to_numpy() == 1)
    with pytest.raises(InvalidValueError, match="'first', 'second'"):
        residency.sleep("third")


def test_what_makes_no_sense_in_a_state_is_refused(device):
    tag = make("state", device)
    buffer = ringmem.empty(PAGE, "uint8", device=device, allocator=tag)
    with pytest.raises(InvalidValueError, match="must be asleep"):
        tag.wake()
    tag.sleep()
    with pytest.raises(InvalidValueError, match="must be awake"):
        tag.sleep()
    with pytest.raises(InvalidValueError, match="asleep"):
        ringmem.empty(10, "uint8", device=device, allocator=tag)
    with pytest.raises(InvalidValueError, match="live"):
        tag.close()
    del buffer  # freeing in sleep is allowed
    gc.collect()
    tag.wake()
    tag.close()
    tag.close()
    assert tag.state == "closed"
    for use in (tag.sleep, tag.wake):
        with pytest.raises(ClosedError):
            use()
    with pytest.raises(ClosedError):
        ringmem.empty(10, "uint8", device=device, allocator=tag)


def test_a_name_is_one_tag_with_one_backup(device):
    tag = make("same", device)
    assert residency.tag("same", device=device) is tag
    assert tag in residency.tags()
    assert residency.tags(device) == [tag]
    with pytest.raises(InvalidValueError, match="'host'"):
        residency.tag("same", "discard", device)
    with pytest.raises(InvalidValueError, match="backup"):
        residency.tag("other", "disk", device)
    tag.close()
    assert residency.tags(device) == []


@pytest.mark.parametrize(
    "options",
    [
        {"min_handle_nbytes": 0},
        {"slot_nbytes": -1},
        {"piece_nbytes": 0},
        {"slot_nbytes": 3 * PAGE},
        {"reserve_nbytes": -1},
    ],
)
def test_wrong_sizes_are_refused(device, options):
    with pytest.raises(InvalidValueError):
        make("wrong", device, **options)


def test_a_device_without_virtual_memory_says_so():
    device = devices_of(_native.HostDriver("virtual_memory=0"))[0]
    with pytest.raises(NotSupportedError, match="virtual memory"):
        make("none", device)


def test_exported_memory_does_not_sleep_unless_promised(device):
    tag = make("exported", device)
    buffer = ringmem.zeros(1000, "uint8", device=device, allocator=tag)
    view = buffer[10:20]
    array = buffer.numpy()
    with pytest.raises(InvalidValueError, match="1 exports"):
        tag.sleep()
    assert tag.state == "awake"
    tag.sleep(allow_exports=True)
    tag.wake()
    assert not array.any()
    del array
    gc.collect()
    tag.sleep()  # a view of the buffer is no export
    tag.wake()
    assert view.shape == (10,)


def test_a_busy_stream_is_waited_for_so_long():
    device = devices_of(_native.HostDriver(f"granularity={PAGE},latency_s=0.8"))[0]
    tag = make("busy", device)
    stream = device.create_stream()
    buffer = ringmem.empty(PAGE, "uint8", device=device, allocator=tag, stream=stream)
    buffer.fill(5)
    with pytest.raises(ringmem.TimeoutError, match="nothing has changed"):
        tag.sleep(timeout_s=0.05)
    assert tag.state == "awake"
    tag.sleep()  # the buffer's own stream is known
    tag.wake()
    assert np.all(buffer.to_numpy() == 5)
    for bad in (-1, True, "x"):
        with pytest.raises(InvalidValueError, match=f"timeout_s is {bad!r}"):
            tag.sleep(timeout_s=bad)
    del buffer
    tag.close()


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_what_a_closed_stream_was_given_is_done_before_memory_sleeps(timeout_s):
    device = devices_of(_native.HostDriver(f"granularity={PAGE},latency_s=0.3"))[0]
    tag = make("left", device)
    buffer = ringmem.empty(PAGE, "uint8", device=device, allocator=tag)
    stream = device.create_stream()
    buffer.fill(5, stream)
    stream.close()
    with pytest.raises(ringmem.TimeoutError, match="nothing has changed"):
        tag.sleep(timeout_s=0.01)
    tag.sleep(timeout_s=timeout_s)
    tag.wake()
    assert np.all(buffer.to_numpy() == 5)
    device.synchronize()
    buffer.close()
    assert _native.flush_reaper(10)
    tag.close()


def test_memory_dropped_behind_a_closed_stream_is_waited_for_before_sleep():
    device = devices_of(_native.HostDriver(f"granularity={PAGE},latency_s=0.3"))[0]
    tag = make("dropped", device)
    kept = ringmem.zeros(PAGE, "uint8", device=device, allocator=tag)
    dropped = ringmem.zeros(PAGE, "uint8", device=device, allocator=tag)
    device.default_stream.synchronize()
    stream = device.create_stream()
    dropped.fill(5, stream)
    stream.close()
    dropped.close()
    with pytest.raises(ringmem.TimeoutError, match="nothing has changed"):
        tag.sleep(timeout_s=0.01)
    tag.sleep()
    tag.wake()
    device.synchronize()  # the device is lost if the fill found no pages
    kept.close()
    tag.close()


def test_waking_without_memory_says_how_much_is_missing_and_keeps_the_backup(device):
    tag = make("large", device)
    data = random_bytes(10 << 20)
    buffer = ringmem.empty(len(data), "uint8", device=device, allocator=tag)
    buffer.copy_from(data)
    tag.sleep()
    other = ringmem.empty(10 << 20, "uint8", device=device)
    with pytest.raises(OutOfMemoryError, match="are missing"):
        tag.wake()
    assert tag.state == "asleep"
    assert tag.backup_nbytes >= len(data)
    other.close()
    device.synchronize()
    device.allocator.trim()
    tag.wake()
    assert np.array_equal(buffer.to_numpy(), data)


def test_progress_counts_up_to_the_end(device):
    tag = make("progress", device)
    buffer = ringmem.zeros(20 * PAGE, "uint8", device=device, allocator=tag)
    seen = []
    tag.sleep(progress=seen.append)
    tag.wake(progress=seen.append)
    for phase in ("sleep", "wake"):
        done = [p.done_nbytes for p in seen if p.phase == phase]
        assert done == sorted(done)
        assert len(done) == 10
        assert done[-1] == buffer.nbytes == seen[0].total_nbytes
    assert seen[0].tag == "progress"


def test_what_progress_raises_calls_it_off(device):
    tag = make("called off", device)
    data = random_bytes(20 * PAGE)
    buffer = ringmem.empty(len(data), "uint8", device=device, allocator=tag)
    buffer.copy_from(data)

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tag.sleep(progress=stop)
    assert tag.state == "awake"
    assert np.array_equal(buffer.to_numpy(), data)
    tag.sleep()
    with pytest.raises(KeyboardInterrupt):
        tag.wake(progress=stop)
    assert tag.state == "asleep"
    tag.wake()
    assert np.array_equal(buffer.to_numpy(), data)


def test_hooks_run_before_unmap_and_after_map(device):
    tag = make("hooks", device)
    buffer = ringmem.zeros(PAGE, "uint8", device=device, allocator=tag)
    calls = []
    tag.before_unmap.append(lambda t: calls.append(("out", t.state)))
    tag.after_map.append(lambda t: calls.append(("in", t.state)))
    tag.sleep()
    tag.wake()
    assert calls == [("out", "awake"), ("in", "awake")]
    assert buffer.nbytes == PAGE


def test_a_hook_that_raises_calls_the_sleep_off_and_puts_back(device):
    tag = make("hooks", device)
    ringmem.zeros(PAGE, "uint8", device=device, allocator=tag)
    calls = []

    def refuse(tag):
        raise RuntimeError("still registered")

    tag.before_unmap += [lambda t: calls.append("out"), refuse]
    tag.after_map.append(lambda t: calls.append("in"))
    with pytest.raises(RuntimeError, match="still registered"):
        tag.sleep()
    assert tag.state == "awake"
    assert calls == ["out", "in"]


def test_a_sleep_that_fails_puts_back_what_hooks_took_out(device, faulty):
    tag = make("hooks", device)
    buffer = ringmem.zeros(PAGE, "uint8", device=device, allocator=tag)
    calls = []
    tag.before_unmap.append(lambda t: calls.append("out"))
    tag.after_map.append(lambda t: calls.append("in"))
    device.synchronize()
    faulty.fail("copy_async")
    with pytest.raises(DriverError):
        tag.sleep()
    assert calls == ["out", "in"]
    assert not buffer.to_numpy().any()


def test_freed_memory_is_used_again_and_trimmed(device):
    tag = make("reuse", device)
    with tag:
        first = ringmem.empty(3 * PAGE, "uint8", device=device)
        second = ringmem.empty(3 * PAGE, "uint8", device=device)
    at, extent = first.ptr, tag.committed
    first.close()
    with tag:
        third = ringmem.empty(3 * PAGE, "uint8", device=device)
    assert third.ptr == at
    assert tag.committed == extent
    assert tag.trim() == 0
    second.close()
    third.close()
    device.synchronize()
    assert tag.trim() == extent
    assert tag.committed == 0
    with tag:
        again = ringmem.zeros(PAGE, "uint8", device=device)
    assert not again.to_numpy().any()


def test_memory_freed_on_one_stream_waits_before_another_gets_it():
    device = devices_of(_native.HostDriver(f"granularity={PAGE},latency_s=0.1"))[0]
    tag = make("streams", device, min_handle_nbytes=PAGE)
    one, two = device.create_stream(), device.create_stream()
    first = ringmem.empty(PAGE, "uint8", device=device, allocator=tag, stream=one)
    first.fill(1)
    at = first.ptr
    first.close()
    second = ringmem.empty(PAGE, "uint8", device=device, allocator=tag, stream=two)
    assert second.ptr != at  # the fill still runs
    third = ringmem.empty(PAGE, "uint8", device=device, allocator=tag, stream=one)
    assert third.ptr == at  # in the order of the same stream
    for buffer in (second, third):
        buffer.close()
    tag.close()


def test_handles_are_as_large_as_asked(device, faulty):
    tag = make("handles", device)
    before = faulty.calls["mem_create"]
    with tag:
        kept = [ringmem.empty(PAGE // 2, "uint8", device=device) for _ in range(8)]
    assert faulty.calls["mem_create"] == before + 1
    assert tag.committed == 4 * PAGE
    del kept


def test_the_backup_is_kept_until_it_is_dropped(device, faulty):
    tag = make("arena", device)
    buffer = ringmem.from_array(random_bytes(10 * PAGE), device=device)
    mine = ringmem.empty(10 * PAGE, "uint8", device=device, allocator=tag)
    mine.copy_from(buffer)
    tag.sleep()
    registered = faulty.calls["host_register"]
    assert registered == 2
    assert residency.drop_backup(device) == 0  # in use
    tag.wake()
    tag.sleep()
    tag.wake()
    assert faulty.calls["host_register"] == registered
    assert residency.drop_backup(device) == 2 * SIZES["piece_nbytes"]
    deadline = time.monotonic() + 5
    while faulty.live["registered"] and time.monotonic() < deadline:
        time.sleep(0.002)
    assert faulty.live["registered"] == 0
    tag.sleep()
    tag.wake()
    assert np.array_equal(mine.to_numpy(), buffer.to_numpy())


def test_two_threads_cannot_put_the_same_tag_to_sleep(device):
    tag = make("threads", device)
    data = random_bytes(40 * PAGE)
    buffer = ringmem.empty(len(data), "uint8", device=device, allocator=tag)
    buffer.copy_from(data)
    device.synchronize()
    outcomes = []

    def work():
        try:
            tag.sleep()
            outcomes.append("slept")
        except InvalidValueError:
            outcomes.append("refused")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 3 + ["slept"]
    tag.wake()
    assert np.array_equal(buffer.to_numpy(), data)


def test_virtual_memory_beside_a_sleeping_tag_is_free_for_others(device):
    tag = make("beside", device)
    held = ringmem.empty(14 << 20, "uint8", device=device, allocator=tag)
    with AddressRange.reserve(device, 14 << 20) as addresses:
        from ringmem.virtual import PhysicalMemory

        with pytest.raises(OutOfMemoryError):
            PhysicalMemory.create(device, 14 << 20)
        tag.sleep()
        with PhysicalMemory.create(device, 14 << 20) as memory:
            addresses.map(memory).unmap()
    tag.wake()
    assert held.nbytes == 14 << 20


def test_what_is_no_name_is_refused_by_name(device):
    with pytest.raises(InvalidValueError, match="name is 5"):
        residency.tag(5, device=device)
    with pytest.raises(InvalidValueError, match="tags is 5"):
        residency.sleep(5)
