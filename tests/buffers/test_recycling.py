"""Objects of dead buffers serve the next ones, and nobody can tell.

Only under a GIL: a free-threaded Python makes each object anew. What these tests demand holds there
too, but for the one that looks at an object served twice.
"""

import subprocess
import sys
import sysconfig
import textwrap
import weakref

import pytest

import ringmem
from ringmem.native import _native
from ringmem.native.errors import DriverError, OutOfMemoryError

MANY = 500  # more than are kept
RECYCLES = not sysconfig.get_config_var("Py_GIL_DISABLED")


def run(script):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_weak_reference_dies_with_its_buffer_and_does_not_see_the_next(device):
    told = []
    buffer = ringmem.DeviceBuffer(64, device=device)
    gone = weakref.ref(buffer, told.append)
    del buffer
    following = [ringmem.DeviceBuffer(64, device=device) for _ in range(MANY)]
    assert gone() is None
    assert told == [gone]
    assert all(weakref.getweakrefcount(buffer) == 0 for buffer in following)


@pytest.mark.skipif(not RECYCLES, reason="objects are recycled only under a GIL")
def test_nothing_of_a_dead_buffer_shows_in_the_next(device):
    stream = device.create_stream()
    old = ringmem.DeviceBuffer((2, 3, 4, 5, 6), "f8", device=device, stream=stream)
    old.record_stream(device.create_stream())
    old.fill(0)
    address = id(old)
    del old
    new = ringmem.DeviceBuffer(64, device=device)
    assert id(new) == address  # else this test looks at nothing
    assert (new.shape, new.nbytes, new.size, new.itemsize, new.dtype) == ((64,), 64, 64, 1, "u1")
    assert (new.closed, new.readonly, new.is_view) == (False, False, False)
    assert _native.buffer_uses(new) == 0
    assert _native.buffer_stream(new) == (0, None)
    assert _native.buffer_streams_in_use(new) == [(0, 0)]
    assert _native.buffer_owner(new) is None
    new.close()
    assert new.closed


def test_a_stream_is_not_kept_by_a_dead_buffer(device):
    stream = device.create_stream()
    gone = weakref.ref(stream)
    ringmem.DeviceBuffer(64, device=device, stream=stream).close()
    del stream
    assert gone() is None


@pytest.mark.parametrize("close", [True, False])
def test_many_buffers_at_once_come_and_go(faulty, live_objects, close):
    device = ringmem.devices_of(faulty)[0]
    references = []
    for _ in range(3):
        buffers = [ringmem.DeviceBuffer(64, device=device) for _ in range(MANY)]
        assert len({buffer.ptr for buffer in buffers}) == MANY
        assert len({id(buffer) for buffer in buffers}) == MANY
        while buffers:
            buffer = buffers.pop()
            if close:
                buffer.close()
            del buffer
        assert set(live_objects(faulty)) <= {"pool"}
        references.append(sys.getrefcount(ringmem.DeviceBuffer))
    assert references[1] == references[2]


def test_the_object_of_a_buffer_that_could_not_be_made_is_sound(faulty):
    device = ringmem.devices_of(faulty)[0]
    for nth in range(1, 4):
        faulty.fail("pool_alloc_async", nth=1, status=_native.Status.out_of_memory)
        with pytest.raises(OutOfMemoryError):
            ringmem.DeviceBuffer(64 * nth, device=device)
        with ringmem.DeviceBuffer(64 * nth, device=device) as buffer:
            assert buffer.nbytes == 64 * nth


def test_a_buffer_that_could_not_be_freed_warns_once_and_its_object_is_sound(faulty):
    device = ringmem.devices_of(faulty)[0]
    buffer = ringmem.DeviceBuffer(64, device=device)
    ptr = buffer.ptr
    faulty.fail("mem_free_async", status=_native.Status.unknown, when="sticky")
    with pytest.raises(DriverError):
        buffer.close()
    assert not buffer.closed
    with pytest.warns(RuntimeWarning, match="could not be freed") as warned:
        del buffer
    assert len(warned) == 1
    faulty.clear()
    with ringmem.DeviceBuffer(64, device=device) as buffer:
        assert buffer.ptr != ptr
    faulty.mem_free_async(0, ptr, 0)


def test_a_subclass_keeps_its_own_objects(device):
    finalized = []

    class Named(ringmem.DeviceBuffer):
        def __init__(self, name, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.name = name

        def __del__(self):
            finalized.append(self.name)

    for name in ("first", "second"):
        buffer = Named(name, 64, device=device)
        address = id(buffer)
        del buffer
        # Without recycling the interpreter's allocator may well give the address to the next.
        assert id(ringmem.DeviceBuffer(64, device=device)) != address or not RECYCLES
    assert finalized == ["first", "second"]


def test_a_buffer_that_was_never_initialized_is_no_buffer():
    raw = ringmem.DeviceBuffer.__new__(ringmem.DeviceBuffer)
    with pytest.raises(TypeError, match="__init__"):
        raw.close()
    del raw


def test_a_long_chain_of_borrowers_is_dropped_without_deep_calls():
    done = run("""
        import ringmem
        from ringmem.native import _native
        device = ringmem.Device("cpu")
        chain = ringmem.DeviceBuffer(64, device=device)
        ptr = chain.ptr
        for _ in range(200_000):
            chain = _native.borrow_memory(0, ptr, 64, "u1", device, None, False, chain)
        assert type(chain) is ringmem.DeviceBuffer
        del chain
        print("dropped")
    """)
    assert done.stdout.split() == ["dropped"], done.stderr


def test_the_interpreter_ends_with_nothing_to_report():
    done = run("""
        import ringmem
        device = ringmem.Device("cpu")
        for _ in range(3):
            buffers = [ringmem.DeviceBuffer(64, device=device) for _ in range(100)]
        first = buffers[0]
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_close_takes_a_stream_by_position_or_name_and_nothing_else(device):
    stream = device.create_stream()
    for close in (
        lambda buffer: buffer.close(),
        lambda buffer: buffer.close(None),
        lambda buffer: buffer.close(stream),
        lambda buffer: buffer.close(stream=stream),
    ):
        buffer = ringmem.DeviceBuffer(64, device=device)
        assert close(buffer) is None
        assert buffer.closed
    buffer = ringmem.DeviceBuffer(64, device=device)
    with pytest.raises(TypeError, match="one optional argument, stream"):
        buffer.close(None, None)
    with pytest.raises(TypeError, match="one optional argument, stream"):
        buffer.close(steam=stream)
    with pytest.raises(TypeError, match="one optional argument, stream"):
        buffer.close(None, stream=stream)
    assert not buffer.closed
