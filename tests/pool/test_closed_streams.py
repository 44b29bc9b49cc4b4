"""Streams that are closed before the memory they use: it is freed behind their work, never lost."""

import os
import signal
import threading
import time

import pytest

import ringmem
from ringmem import NativePool, PinnedPool, Pool, UnifiedPool
from ringmem.native import _native

MIB = 1 << 20
ARENAS = [PinnedPool, UnifiedPool]


@pytest.fixture
def device(faulty):
    return ringmem.devices_of(faulty)[0]


@pytest.fixture
def gate(device):
    """Call it with a stream: that has work then until the test opens the gate, or ends."""
    opened = threading.Event()

    def close(stream):
        device.driver.launch_host_function(0, stream.handle, lambda: opened.wait(30))
        return stream

    close.open = opened.set
    yield close
    opened.set()


def settled(pool):
    """Whether all that was freed is free within some seconds."""
    deadline = time.monotonic() + 10
    while pool.statistics().pending and time.monotonic() < deadline:
        pool.trim()
        time.sleep(0.001)
    return pool.statistics().pending == 0


@pytest.mark.parametrize("make", ARENAS)
@pytest.mark.parametrize("end", ["close", "drop"])
@pytest.mark.parametrize("own", [False, True])
def test_an_arenas_block_is_freed_behind_a_closed_stream(faulty, device, gate, make, end, own):
    pool = make(device)
    stream = gate(device.create_stream())
    block = pool.allocate(4096, device.create_stream() if own else None)
    block.record_stream(stream)
    if end == "close":
        stream.close()
    del stream
    block.close()
    assert block.closed
    pool.trim()
    assert pool.statistics().pending == 4096
    gate.open()
    assert settled(pool)
    assert faulty.calls.get("synchronize", 0) == 0


@pytest.mark.parametrize("make", [Pool, NativePool])
def test_memory_of_a_device_is_freed_behind_a_closed_stream(faulty, device, gate, make):
    pool = make(device)
    stream, own = gate(device.create_stream()), device.create_stream()
    block = pool.allocate(4 * MIB, own)
    ptr = block.ptr
    block.record_stream(stream)
    stream.close()
    block.close()
    again = pool.allocate(4 * MIB, own)  # another address, or the same one behind the stream
    ran = threading.Event()
    faulty.launch_host_function(0, own.handle, ran.set)
    assert again.ptr != ptr or not ran.wait(0.05)
    gate.open()
    assert ran.wait(30)
    again.close()
    assert faulty.calls.get("synchronize", 0) == 0


@pytest.mark.parametrize("make", [*ARENAS, NativePool])
@pytest.mark.parametrize("lost", ["event_create", "event_record"])
def test_a_stream_that_leaves_no_event_loses_no_memory(faulty, device, make, lost):
    pool = make(device)
    stream = device.create_stream()
    block = pool.allocate(4096)
    block.record_stream(stream)
    faulty.fail(lost)
    stream.close()
    block.close()
    assert block.closed
    if make is not NativePool:
        pool.limit = pool.statistics().reserved
        pool.allocate(pool.limit).close()  # waits for the device, since there is nothing else
        assert pool.statistics().pending == 0
    pool.close()
    assert _native.flush_reaper(10)
    assert faulty.calls["synchronize"] > 0


@pytest.mark.parametrize("end", ["close", "drop"])
def test_the_device_is_waited_for_without_the_gil(faulty, device, gate, end):
    pool = NativePool(device)
    stream = gate(device.create_stream())  # which needs it
    block = pool.allocate(4096)
    block.record_stream(stream)
    faulty.fail("event_create")
    stream.close()
    threading.Timer(0.1, gate.open).start()
    if end == "close":
        block.close()
    del block
    assert pool.live == 0


@pytest.mark.parametrize("lost", [None, "event_create"])
def test_an_arena_goes_behind_a_closed_stream(faulty, device, gate, lost):
    pool = PinnedPool(device)
    stream = gate(device.create_stream())
    block = pool.allocate(4096)
    block.record_stream(stream)
    if lost:
        faulty.fail(lost)
    stream.close()
    block.close()
    pool.close()
    assert not _native.flush_reaper(0.05)
    gate.open()
    assert _native.flush_reaper(10)


@pytest.mark.parametrize("make", ARENAS)
def test_a_pool_closed_while_a_thread_waits_for_its_blocks_hands_out_none(
    faulty, device, gate, make
):
    pool = make(device)
    block = pool.allocate(4096)
    block.record_stream(gate(device.create_stream()))
    block.close()
    pool.limit = pool.statistics().reserved
    said = []

    def allocate():
        try:
            said.append(pool.allocate(pool.limit))
        except ringmem.ClosedError as error:
            said.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    while not faulty.calls.get("event_synchronize"):
        time.sleep(0.001)
    pool.close()
    time.sleep(0.05)
    released = "host_unregister" if make is PinnedPool else "mem_free"
    before = faulty.calls[released], pool.statistics().pending
    gate.open()
    thread.join(30)
    assert isinstance(said[0], ringmem.ClosedError)
    assert _native.flush_reaper(10)
    assert before == (faulty.calls[released] - 1, 0)
    assert pool.statistics().pending == 0


@pytest.mark.parametrize("end", ["before", "after"])  # the stream's, and the free
def test_an_arena_stays_while_a_capture_forbids_to_ask(faulty, device, gate, end):
    pool = PinnedPool(device)
    stream = gate(device.create_stream())
    block = pool.allocate(4096)
    block.record_stream(stream)
    if end == "before":
        stream.close()
    block.close()
    released = faulty.calls["host_unregister"]
    faulty.fail("event_query", status=_native.Status.stream_capture_unsupported, times=3)
    pool.close()
    assert not _native.flush_reaper(0.05)
    assert faulty.calls["host_unregister"] == released
    gate.open()
    assert _native.flush_reaper(10)


def test_a_stream_closed_after_the_free_changes_nothing(device, gate):
    pool = PinnedPool(device)
    stream = gate(device.create_stream())
    block = pool.allocate(4096)
    block.record_stream(stream)
    block.close()
    stream.close()
    pool.trim()
    assert pool.statistics().pending == 4096
    gate.open()
    assert settled(pool)


def test_many_blocks_of_one_closed_stream_share_its_event(faulty, device):
    pool = PinnedPool(device)
    stream = device.create_stream()
    blocks = [pool.allocate(4096) for _ in range(100)]
    for block in blocks:
        block.record_stream(stream)
        block.record_stream(stream)
    created = faulty.calls.get("event_create", 0)
    stream.close()
    for block in blocks:
        block.close()
    assert faulty.calls["event_create"] == created + 1
    assert settled(pool)


def test_another_stream_with_the_same_handle_is_another(device, gate):
    """Two drivers share the handles of what one of them wraps."""
    other = ringmem.devices_of(_native.FaultyDriver(device.driver))[0]
    pool, beside = PinnedPool(device), PinnedPool(other)
    stream = gate(device.create_stream())
    block = beside.allocate(4096)
    block.record_stream(stream.handle)  # a foreign one there: nobody tells of its end
    own = pool.allocate(4096)
    own.record_stream(stream)
    block.close()
    stream.close()
    own.close()
    pool.trim()
    assert (pool.statistics().pending, beside.statistics().pending) == (4096, 4096)
    gate.open()
    assert settled(pool)
    assert settled(beside)


def test_a_closed_streams_memory_is_freed_beside_a_capture(faulty, device, gate):
    pool = PinnedPool(device)
    stream = gate(device.create_stream())
    block = pool.allocate(4096)
    block.record_stream(stream)
    captured = device.create_stream()
    faulty.begin_capture(0, captured.handle)
    stream.close()
    block.close()
    pool.trim()
    gate.open()
    assert settled(pool)
    faulty.end_capture(0, captured.handle)  # raises what was spoiled


def test_threads_close_streams_while_others_free(device, hammer):
    pool = PinnedPool(device)

    streams = [device.create_stream() for _ in range(400)]

    def close(number):
        if number < len(streams):
            streams[number].close()

    def use(number):
        with pool.allocate(512) as block:
            stream = streams[number % len(streams)]
            try:
                block.record_stream(stream)
            except ringmem.ClosedError:
                assert stream.closed

    assert hammer.repeat(close, use, use) == []
    assert pool.statistics().live == 0
    for stream in streams:
        stream.close()
    assert settled(pool)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_closes_what_it_inherited_without_harm(device, gate):
    pool = PinnedPool(device)
    stream = gate(device.create_stream())
    block = pool.allocate(4096)
    block.record_stream(stream)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            for one in (stream, block):
                try:
                    one.close()
                except ringmem.NotInitializedError:
                    continue
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    stream.close()
    block.close()
    assert pool.statistics().pending == 4096
    gate.open()
    assert settled(pool)
