"""While a CUDA graph is captured the rest of the process goes on with ringmem: nothing that it does on
other streams may spoil the capture, or join it."""

import numpy as np
import pytest

import ringmem
from ringmem.native import _native

MIB = 2**20
WORD = np.dtype([("value", "<u8")])

OPERATIONS = {}


def operation(prepare):
    """Register a function that prepares and returns what is then done beside the capture."""
    OPERATIONS[prepare.__name__] = prepare
    return prepare


@operation
def pool_grows(room):
    pool = room.keep(ringmem.Pool(room.device))

    def beside():
        for nbytes in (256, MIB, 100 * MIB):
            pool.allocate(nbytes, room.stream).close(room.stream)

    return beside


@operation
def pool_made_and_closed(room):
    def beside():
        with ringmem.Pool(room.device) as pool:
            pool.reserve(32 * MIB)
            pool.allocate(MIB, room.stream).close(room.stream)
            pool.trim()

    return beside


@operation
def pool_reuses_across_streams(room):
    pool = room.keep(ringmem.Pool(room.device, limit=64 * MIB))

    def beside():
        for _ in range(20):
            block = pool.allocate(48 * MIB, room.stream)
            block.record_stream(room.later)
            block.close(room.stream)
            pool.allocate(48 * MIB, room.later).close(room.later)

    return beside


@operation
def pool_trims(room):
    pool = room.keep(ringmem.Pool(room.device))
    for nbytes in (8 * MIB, 64 * MIB):
        pool.allocate(nbytes, room.stream).close(room.stream)

    def beside():
        pool.trim()
        pool.release_threshold = 0

    return beside


@operation
def pool_runs_out(room):
    pool = room.keep(ringmem.Pool(room.device, limit=16 * MIB))
    held = room.keep(pool.allocate(12 * MIB, room.stream))
    assert held.nbytes

    def beside():
        with pytest.raises(ringmem.OutOfMemoryError):
            pool.allocate(8 * MIB, room.later)

    return beside


@operation
def pool_in_debug_mode(room):
    pool = room.keep(ringmem.Pool(room.device, debug=True))

    def beside():
        pool.allocate(MIB, room.stream).close(room.stream)

    return beside


@operation
def pinned_pool(room):
    pool = room.keep(ringmem.PinnedPool(room.device, arena_nbytes=4 * MIB))

    def beside():
        for _ in range(3):
            pool.allocate(MIB, room.stream).close(room.stream)
        pool.allocate(8 * MIB, room.stream).close(room.stream)
        room.stream.synchronize()
        pool.trim()
        _native.flush_reaper(10.0)

    return beside


@operation
def unified_pool(room):
    pool = room.keep(ringmem.UnifiedPool(room.device, arena_nbytes=4 * MIB))

    def beside():
        for _ in range(3):
            pool.allocate(MIB, room.stream).close(room.stream)
        room.stream.synchronize()
        pool.trim()
        _native.flush_reaper(10.0)

    return beside


@operation
def native_pool(room):
    pool = ringmem.NativePool(room.device)
    room.stack.callback(pool.destroy)

    def beside():
        pool.allocate(64 * MIB, room.stream).close(room.stream)
        room.stream.synchronize()
        pool.trim()

    return beside


@operation
def native_pool_made_and_destroyed(room):
    def beside():
        pool = ringmem.NativePool(room.device)
        pool.allocate(MIB, room.stream).close(room.stream)
        room.stream.synchronize()
        pool.destroy()

    return beside


@operation
def device_buffers(room):
    def beside():
        for nbytes in (256, 100 * MIB):
            with ringmem.empty(nbytes, "uint8", device=room.device, stream=room.stream) as buffer:
                buffer.fill(3)
                buffer.copy_from(np.ones(nbytes, "uint8"))
                assert buffer.to_numpy()[0] == 1
                buffer.record_stream(room.later)

    return beside


@operation
def strided_copies(room):
    buffer = room.keep(ringmem.empty((512, 512), "float32", device=room.device, stream=room.stream))

    def beside():
        host = np.ones((1024, 1024), "float32")[::2, ::2]
        buffer.copy_from(host)
        back = np.zeros((1024, 1024), "float32")
        buffer.copy_to(back[::2, ::2])
        assert back[2, 2] == 1

    return beside


@operation
def pinned_buffers(room):
    def beside():
        buffer = ringmem.PinnedBuffer(4 * MIB, "uint8", device=room.device, stream=room.stream)
        buffer.close()
        pinned = ringmem.pin(np.zeros(4 * MIB, "uint8"), device=room.device)
        pinned.close()
        assert _native.flush_reaper(10.0)

    return beside


@operation
def unified_buffers(room):
    def beside():
        buffer = ringmem.UnifiedBuffer(MIB, "uint8", device=room.device, stream=room.stream)
        buffer.prefetch(room.device)
        buffer.fill(2)
        with buffer.host() as view:
            assert view[0] == 2
        del view
        buffer.close()
        assert _native.flush_reaper(10.0)

    return beside


@operation
def streams_and_events(room):
    def beside():
        with room.device.create_stream() as stream:
            event = stream.record()
            room.stream.wait(event)
            event.synchronize()
            assert event.query()
            stream.synchronize()
            stream.synchronize(timeout_s=1.0)
            stream.query()
            event.close()

    return beside


@operation
def device_questions(room):
    def beside():
        assert room.device.memory_info().free
        assert repr(room.device)

    return beside


@operation
def growable_buffers(room):
    def beside():
        with ringmem.GrowableBuffer(256 * MIB, "uint8", room.device) as buffer:
            buffer.resize(64 * MIB)
            buffer.view().fill(1, stream=room.stream)
            buffer.resize(MIB, streams=room.stream)
            buffer.settle()

    return beside


def bridge(room, strategy):
    made = room.keep(ringmem.RingBufferBridge(WORD, 1024, room.device, strategy=strategy))

    def beside():
        assert made.send(np.zeros(100, WORD)) == 100
        made.flush_to_device()
        made.flush_to_host()

    return beside


@operation
def bridge_sync(room):
    return bridge(room, ringmem.Sync())


@operation
def bridge_async(room):
    return bridge(room, ringmem.Async(room.stream))


@operation
def bridge_mapped(room):
    return bridge(room, ringmem.Mapped())


@operation
def bridge_made_and_closed(room):
    def beside():
        with ringmem.RingBufferBridge(WORD, 1024, room.device) as made:
            made.send(np.zeros(100, WORD))
            made.flush_to_device()
        assert _native.flush_reaper(10.0)

    return beside


def double(message, reply, state):
    reply.value = 2 * message.value
    return 0


@operation
def ring_kernel(room):
    pytest.importorskip("numba")
    kernel = ringmem.RingKernel(double, message=WORD, device=room.device, deadline_s=30.0)
    room.stack.enter_context(kernel)
    message = np.zeros((), WORD)

    def beside():
        for value in range(100):
            message["value"] = value
            assert kernel.call(message)["value"] == 2 * value
        kernel.telemetry()

    return beside


@operation
def ring_kernel_made_and_ended(room):
    pytest.importorskip("numba")
    message = np.ones((), WORD)

    def beside():
        with ringmem.RingKernel(
            double, message=WORD, device=room.device, deadline_s=30.0
        ) as kernel:
            assert kernel.call(message)["value"] == 2
            kernel.pause()
            kernel.resume()
        assert _native.flush_reaper(10.0)

    beside()  # compiled and loaded
    return beside


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_capture_elsewhere_goes_on(room, name):
    target = room.keep(ringmem.zeros(16, "uint8", device=room.device, stream=room.captured))
    beside = OPERATIONS[name](room)
    room.captured.synchronize()
    room.stream.synchronize()
    half = target[:8]
    with room.capture() as launch:
        assert room.captured.is_capturing
        assert not room.stream.is_capturing
        target.fill(1, stream=room.captured)
        beside()
        half.fill(2, stream=room.captured)
    assert not room.captured.is_capturing
    if room.device.platform == "cuda":
        assert target.to_numpy().sum() == 0  # nothing of the graph ran yet
    launch()
    assert target.to_numpy().sum() == 8 * 2 + 8
    half.close()
