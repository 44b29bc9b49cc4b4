"""Memory comes back once, at the right time, whatever happens."""

import gc
import subprocess
import sys
import textwrap
import warnings
import weakref

import numpy as np
import pytest

import ringmem
from ringmem.native import _native

KINDS = [ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer]
NOTHING = {}


@pytest.fixture
def device(faulty):
    return ringmem.devices_of(faulty)[0]


@pytest.fixture
def live(live_objects):
    """Count live memory of any kind; not the pool behind it."""

    def count(driver):
        return {kind: n for kind, n in live_objects(driver).items() if kind != "pool"}

    return count


@pytest.mark.parametrize("make", KINDS)
def test_dropping_a_buffer_frees_it_silently(faulty, device, make, live):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer = make(100, "f4", device=device)
        assert live(faulty) != NOTHING
        del buffer
        assert live(faulty) == NOTHING


@pytest.mark.parametrize("make", KINDS)
def test_close_is_idempotent_and_frees_once(faulty, device, make, live):
    buffer = make(100, "f4", device=device)
    buffer.close()
    assert live(faulty) == NOTHING
    calls = faulty.calls
    buffer.close()
    buffer.close(stream=device.create_stream())
    del buffer
    gc.collect()
    assert {op: n for op, n in faulty.calls.items() if n != calls[op]}.keys() <= {
        "stream_create",
        "stream_destroy",
    }


@pytest.mark.parametrize("make", KINDS)
def test_memory_lives_as_long_as_its_last_view(faulty, device, make, live):
    view = make(100, "f4", device=device)[10:][:5]
    assert live(faulty) != NOTHING
    view.fill(1)
    assert view.to_numpy().tolist() == [1] * 5
    del view
    assert live(faulty) == NOTHING


@pytest.mark.parametrize(
    "export",
    [
        lambda b: b.numpy(),
        lambda b: b.numpy()[1:][::2],
        np.asarray,
        memoryview,
        np.from_dlpack,
        lambda b: b.__dlpack__(),
        lambda b: b.__dlpack__(max_version=(1, 0)),
        lambda b: _native.buffer_hold(b),
    ],
)
@pytest.mark.parametrize("make", [ringmem.DeviceBuffer, ringmem.PinnedBuffer])
def test_memory_lives_as_long_as_its_last_export(faulty, device, make, export, live):
    buffer = make(100, "f4", device=device)
    buffer.fill(2)
    exported = export(buffer)
    del buffer
    assert live(faulty) != NOTHING
    del exported
    assert live(faulty) == NOTHING


def test_a_buffer_keeps_its_device_and_stream(faulty):
    stream = ringmem.devices_of(faulty)[0].create_stream()
    buffer = ringmem.empty(10, stream=stream)
    gone = weakref.ref(stream)
    del stream
    gc.collect()
    assert gone() is buffer.stream
    buffer.fill(0)
    buffer.close()
    del buffer
    gc.collect()
    assert gone() is None


def test_the_order_of_dropping_does_not_matter(faulty, live_objects):
    device = ringmem.devices_of(faulty)[0]
    stream = device.create_stream()
    buffer = ringmem.zeros(10, "f4", stream=stream)
    view, array = buffer[2:], np.asarray(buffer)
    objects = [device, stream, buffer, view, array]
    del device, stream, buffer, view, array
    while objects:
        objects.pop(0)
        gc.collect()
    assert live_objects(faulty) == NOTHING


def test_a_cycle_through_a_buffer_is_collected(faulty, device, live):
    class Holder:
        pass

    holder = Holder()
    holder.buffer = ringmem.as_buffer(np.zeros(3))
    array_like = Holder()
    array_like.__dict__["self"] = array_like
    holder.memory = ringmem.empty(10, device=device)
    holder.me = holder
    gone = weakref.ref(holder)
    del holder
    assert live(faulty) == NOTHING
    assert gone() is None


def test_a_failed_free_raises_and_can_be_repeated(faulty, device, live):
    buffer = ringmem.full(3, 4, "i4", device=device)
    faulty.fail("mem_free_async")
    with pytest.raises(ringmem.DriverError) as caught:
        buffer.close()
    assert caught.value.operation == "cuMemFreeAsync"
    assert not buffer.closed
    assert buffer.to_numpy().tolist() == [4, 4, 4]
    buffer.close()
    assert buffer.closed
    assert live(faulty) == NOTHING


def test_a_finalizer_tries_twice_and_then_warns_once_with_the_place(faulty, device):
    before = _native.track_allocation_places(True)
    buffer = ringmem.empty(3, "i4", device=device)
    _native.track_allocation_places(before)
    faulty.fail("mem_free_async")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del buffer
        gc.collect()
    _native.track_allocation_places(True)
    buffer = ringmem.empty(3, "i4", device=device)
    _native.track_allocation_places(before)
    ptr = buffer.ptr
    faulty.fail("mem_free_async", times=2)
    with pytest.warns(RuntimeWarning, match=r"could not be freed.*test_ownership\.py:") as caught:
        del buffer
        gc.collect()
    assert len(caught) == 1
    device.driver.mem_free_async(0, ptr)


def test_a_finalizer_names_a_file_whose_name_is_no_text(faulty, device):
    scope = {"ringmem": ringmem, "device": device, "__name__": "elsewhere"}
    before = _native.track_allocation_places(True)
    code = compile("buffer = ringmem.empty(3, 'i4', device=device)", "odd\udcff.py", "exec")
    exec(code, scope)
    _native.track_allocation_places(before)
    ptr = scope["buffer"].ptr
    faulty.fail("mem_free_async", times=2)
    with pytest.warns(RuntimeWarning, match=r"allocated at odd\\udcff\.py:1$"):
        del scope["buffer"]
        gc.collect()
    device.driver.mem_free_async(0, ptr)


def test_a_finalizer_keeps_the_exception_that_is_on_its_way(faulty, device):
    def work():
        buffer = ringmem.empty(3, "i4", device=device)
        faulty.fail("mem_free_async", times=2)
        ptrs.append(buffer.ptr)
        raise KeyError("mine")

    ptrs = []
    with pytest.warns(RuntimeWarning), pytest.raises(KeyError, match="mine") as caught:
        try:
            work()
        except KeyError as error:
            error.__traceback__ = None
            raise
    del caught
    gc.collect()
    device.driver.mem_free_async(0, ptrs[0])


def test_the_reaper_repeats_what_fails_and_reports_what_stays_lost(faulty, device, live):
    for times in (1, 2):
        buffer = ringmem.PinnedBuffer(3, device=device)
        faulty.fail("host_free", times=times)
        buffer.close()
        assert live(faulty) == NOTHING
    buffer = ringmem.PinnedBuffer(3, device=device)
    ptr = buffer.ptr
    faulty.fail("host_free", times=3)
    with pytest.warns(RuntimeWarning, match="cuMemFreeHost of 3 bytes failed"):
        buffer.close()
        assert _native.flush_reaper(10)
        for _ in range(1000):  # the main thread makes the warning between two of its steps
            pass
    device.driver.host_free(0, ptr)


def test_borrowed_memory_lets_go_of_its_owner_when_closed():
    array = np.zeros(10).view(type("Array", (np.ndarray,), {}))
    gone = weakref.ref(array)
    buffer = ringmem.as_buffer(array)
    view = buffer[1:]
    del array
    gc.collect()
    assert gone() is not None
    view.close()
    buffer.close()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "tail",
    ["", "buffer.close()", "array = buffer.numpy()", "view = buffer[:2]", "del buffer",
     "capsule = buffer.__dlpack__()"],
)  # fmt: skip
def test_python_ends_quietly_with_live_buffers(tail):
    code = f"""
        import ringmem
        buffer = ringmem.zeros(100, "f4", device="cpu")
        pinned = ringmem.PinnedBuffer(100, "f4", device="cpu")
        managed = ringmem.UnifiedBuffer(100, "f4", device="cpu")
        borrowed = ringmem.as_buffer(bytearray(100))
        stream = buffer.device.create_stream()
        pinned.copy_from(buffer, stream)
        buffer = pinned if {"numpy" in tail} else buffer
        {tail}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_forked_child_leaves_the_parents_releases_alone(tmp_path):
    code = """
        import os, warnings
        warnings.simplefilter("ignore")
        import ringmem
        from ringmem.native import _native
        with ringmem.simulate(latency_s=0.3) as simulation:
            stream = simulation.devices[0].create_stream()
            pinned = ringmem.PinnedBuffer(100, "f4", stream=stream)
            pinned.fill(1, stream)
            pinned.close()
            assert _native.reaper_pending() == 1
            child = os.fork()
            if child == 0:
                os._exit(_native.reaper_pending())
            assert os.waitpid(child, 0)[1] == 0
            assert _native.reaper_pending() == 1
            assert _native.flush_reaper(10)
            print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
