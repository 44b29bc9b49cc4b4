"""What streams that are captured into a CUDA graph get, and leave to others."""

import gc
from functools import partial

import numpy as np
import pytest

import ringmem
from ringmem.native import _native

MIB = 2**20


@pytest.fixture
def target(room):
    made = ringmem.zeros(4096, "uint8", device=room.device, stream=room.captured)
    room.captured.synchronize()
    yield made
    made.close()


@pytest.mark.parametrize("nbytes", [4096, 48 * MIB])
def test_memory_freed_on_a_captured_stream_is_passed_by(room, target, nbytes):
    """An event recorded there would make the stream that waits for it join the capture."""
    with ringmem.Pool(room.device) as pool:
        first = pool.allocate(nbytes, room.captured)
        place = first.ptr
        first.close(room.captured)
        with room.capture() as launch:
            target.fill(1, stream=room.captured)
            other = pool.empty(nbytes, "uint8", stream=room.stream)
            assert other.ptr != place
            other.fill(7, stream=room.stream)
            assert other.to_numpy().sum() == 7 * nbytes  # it ran: the stream joined no capture
            own = pool.allocate(nbytes, room.captured)
            assert own.ptr == place
            own.close(room.captured)
            other.close()
        launch()
        assert target.to_numpy().sum() == 4096


def test_memory_of_a_captured_stream_counts_as_lacking(room, target):
    with ringmem.Pool(room.device, limit=64 * MIB) as pool:
        pool.allocate(48 * MIB, room.captured).close(room.captured)
        with room.capture() as launch:
            target.fill(1, stream=room.captured)
            with pytest.raises(ringmem.OutOfMemoryError, match="captured into a graph"):
                pool.allocate(48 * MIB, room.stream)
        launch()
        pool.allocate(48 * MIB, room.stream).close(room.stream)  # the capture is over


def test_a_captured_stream_gets_memory_without_waiting(room):
    """Its own, what is done, or new: never what would need a wait that a capture cannot have."""
    with ringmem.Pool(room.device) as pool:
        pool.allocate(48 * MIB, room.stream).close(room.stream)
        pool.allocate(4096, room.stream).close(room.captured)
        pool.allocate(8 * MIB, room.captured).close(room.captured)
        with room.capture() as launch:
            held = []
            for nbytes in (48 * MIB, 4 * MIB, 4096, 48 * MIB, 256, 2000 * 256):
                held.append(pool.empty(nbytes, "uint8", stream=room.captured))
                held[-1].fill(9, stream=room.captured)
        launch()
        for buffer in held:
            content = buffer.to_numpy()
            assert content.min() == content.max() == 9
            buffer.close()
        room.captured.synchronize()
        pool.allocate(48 * MIB, room.stream).close(room.stream)


def test_a_captured_stream_with_only_memory_that_others_use(room, target):
    """The last pages are free, but another stream's work was not seen to be done: the host waits."""
    with ringmem.Pool(room.device, limit=64 * MIB) as pool:
        pool.allocate(60 * MIB, room.stream).close(room.stream)
        with room.capture() as launch:
            target.fill(1, stream=room.captured)
            block = pool.allocate(60 * MIB, room.captured)
        launch()
        block.close(room.captured)


def test_memory_freed_in_a_capture_stays_its_streams(room, target):
    with ringmem.Pool(room.device, limit=64 * MIB) as pool:
        places = []
        with room.capture() as launch:
            target.fill(1, stream=room.captured)
            for _ in range(3):
                block = pool.allocate(48 * MIB, room.captured)
                places.append(block.ptr)
                block.close(room.captured)
            with pytest.raises(ringmem.OutOfMemoryError, match="captured into a graph"):
                pool.allocate(48 * MIB, room.stream)
        assert len(set(places)) == 1  # in order on its own stream
        launch()
        pool.allocate(48 * MIB, room.stream).close(room.stream)


def test_streams_without_a_slot_of_their_own(room, target):
    """From the 64th on, streams share one, whose events are recorded when memory is freed."""
    many = [room.keep(room.device.create_stream()) for _ in range(70)]
    with ringmem.Pool(room.device, limit=64 * MIB) as pool:
        for stream in many:
            pool.allocate(MIB, stream).close(stream)
        late = many[-1]
        with room.capture(late) as launch:
            target.fill(1, stream=late)
            pool.allocate(48 * MIB, late).close(late)
            with pytest.raises(ringmem.OutOfMemoryError, match="captured into a graph"):
                pool.allocate(48 * MIB, many[-2])
        launch()
        pool.allocate(48 * MIB, many[-2]).close(many[-2])


HOST_MEMORY = {
    "PinnedPool": lambda room: room.keep(ringmem.PinnedPool(room.device)).allocate,
    "UnifiedPool": lambda room: room.keep(ringmem.UnifiedPool(room.device)).allocate,
    "PinnedBuffer": lambda room: partial(ringmem.PinnedBuffer, device=room.device),
    "UnifiedBuffer": lambda room: partial(ringmem.UnifiedBuffer, device=room.device),
}


@pytest.mark.parametrize("kind", HOST_MEMORY)
def test_host_memory_of_a_captured_stream_cannot_be_closed_meanwhile(room, target, kind):
    """The graph may be launched at any time, and no event tells when it was."""
    allocate = HOST_MEMORY[kind](room)
    with room.capture() as launch:
        target.fill(1, stream=room.captured)
        memory = allocate(4096, stream=room.captured)
        with pytest.raises(
            ringmem.DriverError, match="not permitted while the stream is capturing"
        ):
            memory.close()
    launch()
    memory.close()
    assert _native.flush_reaper(10.0)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kind", HOST_MEMORY)
def test_host_memory_that_is_dropped_in_a_capture_is_freed_after_it(room, target, kind, closed):
    allocate = HOST_MEMORY[kind](room)
    stream = room.device.create_stream()
    memory = allocate(4096, stream=stream)
    with room.capture(stream) as launch:
        target.fill(1, stream=stream)
        del memory
        gc.collect()
        assert not _native.flush_reaper(0.05)
    launch()
    if closed:
        stream.close()
    assert _native.flush_reaper(10.0)
    if room.device.platform == "cpu" and kind.endswith("Buffer"):
        live = room.device.driver.live
        assert live["pinned"] == live["managed"] == 0


def test_the_memory_of_a_closed_stream_that_a_captured_one_used(room, target):
    stream = room.device.create_stream()
    buffer = ringmem.empty(4096, "uint8", device=room.device, stream=stream)
    buffer.record_stream(room.captured)
    stream.close()
    with room.capture() as launch:
        target.fill(1, stream=room.captured)
        with pytest.raises(
            ringmem.DriverError, match="not permitted while the stream is capturing"
        ):
            buffer.close()
    launch()
    buffer.close()
    assert _native.flush_reaper(10.0)


def test_the_stream_of_another_library_is_known_in_a_capture(room, target):
    with room.capture() as launch:
        foreign = ringmem.as_stream(room.captured.handle, room.device)
        assert foreign.is_capturing
        target.fill(1, stream=foreign)
    launch()
    assert target.to_numpy().sum() == 4096


def test_memory_whose_stream_was_closed_is_freed_during_a_capture(room, target):
    """Its last event tells when it is done; waiting for the device would spoil the capture."""
    stream = room.device.create_stream()
    buffer = ringmem.empty(MIB, "uint8", device=room.device, stream=stream)
    buffer.fill(3)
    pool = room.keep(ringmem.Pool(room.device))
    block = pool.allocate(MIB, stream)
    with room.capture() as launch:
        target.fill(1, stream=room.captured)
        stream.close()
        buffer.close()
        block.close()
        assert _native.flush_reaper(10.0)
    launch()


@pytest.mark.parametrize("captured_first", [False, True])
def test_a_buffer_used_inside_and_outside_a_capture_is_kept(room, target, captured_first):
    """Freeing it would make one of the streams wait for the other, in a capture or out of it."""
    streams = [room.captured, room.stream][:: 1 if captured_first else -1]
    buffer = ringmem.empty(4096, "uint8", device=room.device, stream=streams[0])
    with room.capture() as launch:
        target.fill(1, stream=room.captured)
        buffer.record_stream(streams[1])
        with pytest.raises(ringmem.DriverError, match="capture of a graph cannot wait"):
            buffer.close()
    launch()
    buffer.close()


def test_pages_given_up_on_a_captured_stream_stay(room, target):
    with ringmem.GrowableBuffer(64 * MIB, "uint8", room.device, shape=8 * MIB) as buffer:
        held = buffer.committed
        with room.capture() as launch:
            target.fill(1, stream=room.captured)
            buffer.resize(MIB, streams=room.captured)
            buffer.settle()
        launch()
        buffer.settle()
        assert buffer.committed == held  # the graph may be launched again at any time


def test_debug_mode_checks_nothing_of_a_capture(room, target):
    with ringmem.Pool(room.device, debug=True) as pool:
        before = pool.allocate(4096, room.captured)
        with room.capture() as launch:
            target.fill(1, stream=room.captured)
            inside = pool.empty(4096, "uint8", stream=room.captured)
            inside.fill(5, stream=room.captured)
            before.close(room.captured)
            pool.allocate(100, room.captured).close(room.captured)
        launch()
        launch()
        assert inside.to_numpy().sum() == 5 * 4096
        inside.close()
        room.captured.synchronize()
        assert pool.debug_reports() == []


def test_the_garbage_collector_may_run_in_a_capture(room, target):
    held = [
        ringmem.empty(4096, "uint8", device=room.device, stream=room.stream),
        ringmem.PinnedBuffer(4096, "uint8", device=room.device, stream=room.stream),
        ringmem.UnifiedBuffer(4096, "uint8", device=room.device, stream=room.stream),
        ringmem.Pool(room.device).empty(4096, "uint8", stream=room.stream),
        ringmem.PinnedPool(room.device).allocate(4096, room.stream),
        ringmem.GrowableBuffer(8 * MIB, "uint8", room.device, shape=MIB),
        room.device.create_stream(),
        room.stream.record(),
    ]
    with room.capture() as launch:
        target.fill(1, stream=room.captured)
        held.clear()
        gc.collect()
        assert _native.flush_reaper(10.0)
    launch()


def hold(room, stream):
    """Keep the stream's work pending until the returned function is called."""
    flag = room.keep(ringmem.PinnedBuffer(1, "uint32", device=room.device))
    view = flag.numpy()
    view[...] = 0
    room.device.driver.stream_wait_value(room.device.ordinal, stream.handle, flag.ptr, 1)

    def let_go():
        view[...] = 1

    room.stack.callback(let_go)
    return let_go


@pytest.mark.parametrize("kind", ["pool", "buffer"])
def test_memory_of_a_closed_stream_waits_for_the_stream_it_is_closed_on(room, kind):
    own = room.device.create_stream()
    if kind == "pool":
        memory = room.keep(ringmem.Pool(room.device)).allocate(MIB, own)
    else:
        memory = ringmem.empty(MIB, "uint8", device=room.device, stream=own)
    own.close()
    let_go = hold(room, room.stream)
    memory.close(room.stream)
    assert not _native.flush_reaper(0.1)
    let_go()
    assert _native.flush_reaper(10.0)


def test_pages_with_work_from_before_a_capture_are_not_unmapped(room, target):
    buffer = ringmem.GrowableBuffer(64 * MIB, "uint8", room.device, shape=8 * MIB)
    let_go = hold(room, room.captured)
    buffer.view().fill(3, stream=room.captured)
    with room.capture() as launch:
        target.fill(1, stream=room.captured)
        with pytest.raises(
            ringmem.DriverError, match="not permitted while the stream is capturing"
        ):
            buffer.close(room.captured)
        assert not buffer.closed
    let_go()
    launch()
    room.captured.synchronize()
    assert buffer.view().to_numpy().min() == 3
    buffer.close()


def test_a_pool_is_closed_after_the_capture_in_which_it_freed(room, target):
    pool = ringmem.Pool(room.device)
    with room.capture() as launch:
        target.fill(1, stream=room.captured)
        for nbytes in (100, 8 * MIB):
            pool.allocate(nbytes, room.captured).close(room.captured)
        with pytest.raises(ringmem.DriverError, match="when that is over"):
            pool.close()
        pool.allocate(MIB, room.stream).close(room.stream)  # it is as it was
    launch()
    pool.close()


def test_a_pool_that_is_dropped_in_a_capture_goes_after_it(room, target):
    pool = ringmem.Pool(room.device)
    with room.capture() as launch:
        target.fill(1, stream=room.captured)
        pool.allocate(8 * MIB, room.captured).close(room.captured)
        del pool
        gc.collect()
        assert not _native.flush_reaper(0.05)
    launch()
    assert _native.flush_reaper(10.0)
    if room.device.platform == "cpu":
        assert room.device.driver.live["mapping"] == 0


def test_two_streams_without_a_slot_capture_at_once(room, target):
    many = [room.keep(room.device.create_stream()) for _ in range(70)]
    with ringmem.Pool(room.device, limit=64 * MIB) as pool:
        for stream in many:
            pool.allocate(MIB, stream).close(stream)
        first, second, third = many[-3:]
        with room.capture(first) as launch:
            target.fill(1, stream=first)
            pool.allocate(2 * MIB, first).close(first)
            room.begin(second)
            pool.allocate(4 * MIB, second).close(second)
            assert room.end(second)[0] == 0
            with pytest.raises(ringmem.OutOfMemoryError):
                pool.allocate(62 * MIB, third)  # waits for no device: `first` goes on
        launch()
        pool.allocate(62 * MIB, third).close(third)


def test_waiting_for_a_captured_stream_is_refused_and_spoils_nothing(room, target):
    with room.capture() as launch:
        target.fill(1, stream=room.captured)
        for wait in (
            room.captured.synchronize,
            room.captured.query,
            lambda: room.captured.synchronize(timeout_s=1.0),
            lambda: target.to_numpy(),
        ):
            with pytest.raises(ringmem.DriverError, match="not permitted while"):
                wait()
    launch()
    assert target.to_numpy().sum() == 4096


def test_a_graph_copies_only_from_and_to_memory_that_stays(room, target):
    pinned = ringmem.PinnedBuffer(4096, "uint8", device=room.device)
    pinned.numpy()[...] = 6
    with room.capture() as launch:
        for copy in (target.copy_from, target.copy_to):
            with pytest.raises(ringmem.InvalidValueError, match="PinnedBuffer that lives as long"):
                copy(np.zeros(4096, "uint8"), stream=room.captured)
        target.copy_from(pinned.numpy(), stream=room.captured)
    launch()
    assert target.to_numpy().min() == 6
    pinned.close()
