import gc
import pickle
import threading
import time

import numpy as np
import pytest

import ringmem
from ringmem import ClosedError, DriverError, InvalidValueError, NotSupportedError, OutOfMemoryError
from ringmem.native import _native
from ringmem.virtual import GrowableBuffer

from .conftest import fill_now, live_objects


def test_growth_moves_nothing(device, page):
    with GrowableBuffer((4096, 256), "float32", device) as buffer:
        before = buffer.ptr
        for length in (1, 10, 100, 500):
            old = len(buffer)
            buffer.resize(length)
            view = buffer.view()
            view[old:].fill(length)
            assert buffer.ptr == before == view.ptr
        expected = np.concatenate(
            [np.full(n, v) for n, v in ((1, 1), (9, 10), (90, 100), (400, 500))]
        )
        assert np.array_equal(buffer.view().to_numpy()[:, 0], expected)
        del view


def test_it_says_what_it_is(device, page):
    with GrowableBuffer((1024, 128), "float16", device, shape=100) as buffer:
        assert buffer.shape == (100, 128)
        assert buffer.max_shape == (1024, 128)
        assert buffer.dtype == np.float16
        assert buffer.size == 12800
        assert buffer.nbytes == 25600
        assert len(buffer) == 100
        assert buffer.device is device
        assert buffer.committed == page
        assert buffer.reserved == 1024 * 128 * 2
        assert buffer.handles == 1
        assert "100" in repr(buffer)
        buffer.resize((200, 128))
        assert buffer.shape == (200, 128)
    assert buffer.closed
    assert "closed" in repr(buffer)


def test_an_empty_buffer_holds_no_memory(device):
    free = device.memory_info().free
    with GrowableBuffer(1 << 24, device=device) as buffer:
        assert buffer.committed == 0
        assert device.memory_info().free == free
        assert buffer.view().shape == (0,)
        buffer.fill(1)


@pytest.mark.parametrize("shape", [-1, 1025, (10, 5), (10,), (10, 4, 1), (-1, 4)])
def test_shapes_that_cannot_be_are_refused_and_change_nothing(device, shape):
    with GrowableBuffer((1024, 4), "int32", device, shape=7) as buffer:
        with pytest.raises(InvalidValueError, match="shape"):
            buffer.resize(shape)
        assert buffer.shape == (7, 4)


@pytest.mark.parametrize("max_shape", [0, (), (-1, 4), (0, 4), 2**63, (2**40, 2**40)])
def test_maxima_that_cannot_be_are_refused(device, max_shape):
    with pytest.raises(InvalidValueError):
        GrowableBuffer(max_shape, "uint8", device)


def test_a_device_without_virtual_memory_says_so():
    device = ringmem.devices_of(_native.HostDriver("virtual_memory=0"))[0]
    with pytest.raises(NotSupportedError, match="virtual memory"):
        GrowableBuffer(1, device=device)


def test_without_export_it_works_unshared():
    device = ringmem.devices_of(_native.HostDriver("export=0"))[0]
    with pytest.raises(NotSupportedError, match="shareable=False"):
        GrowableBuffer(1, device=device)
    buffer = GrowableBuffer(10, device=device, shareable=False, shape=10)
    with pytest.raises(NotSupportedError, match="shareable"):
        buffer.share()


def test_a_shrink_gives_memory_back(device, page):
    with GrowableBuffer(64 * page, device=device, max_handle_nbytes=4 * page) as buffer:
        buffer.resize(64 * page)
        buffer.resize(6 * page)
        buffer.settle()
        assert buffer.committed == 8 * page
        assert device.memory_info().total - device.memory_info().free == 8 * page


def test_a_shrink_does_not_wait_and_frees_when_the_work_is_done(page):
    driver = _native.FaultyDriver(_native.HostDriver(f"granularity={page},latency_s=0.1"))
    device = ringmem.devices_of(driver)[0]
    stream = device.create_stream()
    buffer = GrowableBuffer(64 * page, device=device, max_handle_nbytes=page)
    buffer.resize(8 * page)
    buffer.fill(5, stream=stream)
    start = time.perf_counter()
    buffer.resize(page, streams=stream)
    assert time.perf_counter() - start < 0.08
    assert buffer.committed == 8 * page
    buffer.resize(4 * page)  # taken back in place, with its bytes
    buffer.settle()
    assert buffer.committed == 4 * page
    assert np.all(buffer.view().to_numpy() == 5)
    buffer.close()


def test_recorded_streams_hold_off_a_shrink(page):
    device = ringmem.devices_of(_native.HostDriver(f"granularity={page},latency_s=0.1"))[0]
    stream = device.create_stream()
    with GrowableBuffer(8 * page, device=device, max_handle_nbytes=page, shape=8 * page) as buffer:
        buffer.record_stream(stream)
        buffer.fill(1, stream=stream)
        buffer.resize(0)
        assert buffer.committed == 8 * page
        buffer.settle()
        assert buffer.committed == 0
    stream.synchronize()


def test_work_on_memory_that_went_really_faults(page):
    driver = _native.HostDriver(f"granularity={page}")
    device = ringmem.devices_of(driver)[0]
    buffer = GrowableBuffer(8 * page, device=device, max_handle_nbytes=page, shape=8 * page)
    ptr = buffer.ptr
    buffer.resize(page)
    buffer.settle()
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        fill_now(device, ptr + 4 * page, 16)


def test_memory_mapped_ahead_makes_growth_free_of_driver_calls(device, faulty, page):
    with GrowableBuffer(1 << 24, device=device) as buffer:
        buffer.reserve_ahead(16 * page)
        buffer.settle()
        assert buffer.committed == 16 * page
        before = sum(faulty.calls.values())
        buffer.resize(4 * page)
        buffer.resize(7 * page)
        assert sum(faulty.calls.values()) == before
        buffer.fill(1)
        buffer.resize(12 * page)
        buffer.settle()
        assert buffer.committed >= 20 * page
        with pytest.raises(InvalidValueError, match="nbytes"):
            buffer.reserve_ahead(-1)


def test_map_ahead_that_finds_no_memory_is_silent_until_growth_needs_it(device, page):
    with (
        GrowableBuffer(1 << 30, device=device) as buffer,
        GrowableBuffer(1 << 26, device=device, shape=(64 << 20) - 4 * page),
    ):
        buffer.reserve_ahead(16 * page)
        buffer.settle()
        buffer.resize(4 * page)
        with pytest.raises(OutOfMemoryError):
            buffer.resize(5 * page)
        assert buffer.shape == (4 * page,)


def test_a_view_holds_off_shrink_and_close(device, page):
    buffer = GrowableBuffer(64 * page, device=device, shape=8 * page)
    view = buffer.view(4 * page)
    view.fill(3)
    with pytest.raises(InvalidValueError, match="view"):
        buffer.resize(4 * page - 1)
    with pytest.raises(InvalidValueError, match="view"):
        buffer.close()
    buffer.resize(4 * page)
    buffer.resize(32 * page)
    assert np.all(view.to_numpy() == 3)
    with pytest.raises(InvalidValueError, match="length"):
        buffer.view(33 * page)
    del view
    buffer.resize(0)
    buffer.close()
    buffer.close()


def test_closing_a_view_lets_go(device, page):
    buffer = GrowableBuffer(64 * page, device=device, shape=8 * page)
    view = buffer.view()
    view.close()
    del view
    buffer.resize(0)
    buffer.close()


def test_dlpack_imports_share_the_memory_and_hold_off_a_shrink(device, page):
    with GrowableBuffer((1024, 256), "float32", device, shape=4) as buffer:
        buffer.fill(2)
        array = np.from_dlpack(buffer)
        assert array.shape == (4, 256)
        assert np.all(array == 2)
        with pytest.raises(InvalidValueError, match="view"):
            buffer.resize(3)
        buffer.resize(1000)
        assert array.ctypes.data == buffer.ptr
        del array
        gc.collect()
        buffer.resize(1)


def test_use_after_close_is_an_error(device):
    buffer = GrowableBuffer(1024, device=device, shape=10)
    buffer.close()
    for use in (lambda: buffer.resize(20), lambda: buffer.ptr, buffer.view, buffer.settle):
        with pytest.raises(ClosedError):
            use()


def test_running_out_changes_nothing(device, page):
    with GrowableBuffer(1 << 30, device=device, shape=100) as buffer:
        buffer.fill(1)
        with pytest.raises(OutOfMemoryError, match="free"):
            buffer.resize(1 << 29)
        assert buffer.shape == (100,)
        assert np.all(buffer.view().to_numpy() == 1)
        buffer.resize(1 << 24)


def test_memory_that_another_buffer_gave_up_is_found(device, page):
    with (
        GrowableBuffer(1 << 26, device=device) as first,
        GrowableBuffer(1 << 26, device=device) as second,
    ):
        first.resize(60 << 20)
        first.resize(0)
        second.resize(60 << 20)
        assert second.nbytes == 60 << 20


def test_access_follows_the_buffer_as_it_grows(pair, page):
    first, second = pair
    with GrowableBuffer(1 << 22, device=first, shape=page) as buffer:
        buffer.set_access({second: "readwrite"})
        buffer.resize(1 << 20)
        driver = first.driver
        location = _native.Location(_native.LocationKind.device, 1)
        assert driver.mem_get_access(buffer.ptr, location) == _native.Access.readwrite
        assert driver.mem_get_access(buffer.ptr + (1 << 20) - page, location) == (
            _native.Access.readwrite
        )


def test_a_forgotten_buffer_is_released_behind_its_work(page):
    driver = _native.FaultyDriver(_native.HostDriver(f"granularity={page},latency_s=0.05"))
    device = ringmem.devices_of(driver)[0]
    buffer = GrowableBuffer(8 * page, device=device, shape=8 * page)
    buffer.fill(1)
    del buffer
    gc.collect()
    device.synchronize()  # the fill found its memory
    assert live_objects(driver) == {}


def test_cost_of_growth_does_not_grow_with_the_handles(page):
    device = ringmem.devices_of(_native.HostDriver("granularity=4096,capacity=4GiB"))[0]
    buffer = GrowableBuffer(1 << 30, device=device, max_handle_nbytes=4096, shareable=False)

    def cost(start, steps=300):
        times = []
        for step in range(steps):
            begin = time.perf_counter()
            buffer.resize((start + step + 1) * 4096)
            times.append(time.perf_counter() - begin)
        return np.median(times)

    few = cost(10)
    buffer.resize(9_700 * 4096)
    many = cost(9_700)
    assert many < 2 * few + 20e-6
    buffer.close()


def test_threads_grow_and_shrink_without_harm(device, page):
    with GrowableBuffer(256 * page, device=device, max_handle_nbytes=4 * page) as buffer:
        buffer.reserve_ahead(8 * page)
        errors = []

        def work(seed):
            random = np.random.default_rng(seed)
            try:
                for _ in range(50):
                    buffer.resize(int(random.integers(0, 256)) * page)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        buffer.resize(256 * page)
        buffer.fill(1)
        device.synchronize()


def test_recycled_memory_is_zero_for_its_next_owner(device, faulty, page):
    from ringmem.virtual import set_recycle_limit

    set_recycle_limit(16 * page)
    first = GrowableBuffer(8 * page, device=device, max_handle_nbytes=page, shape=8 * page)
    second = GrowableBuffer(8 * page, device=device, max_handle_nbytes=page)
    first.fill(0xAB)
    first.resize(0)
    first.settle()
    deadline = time.monotonic() + 5
    while faulty.live["mapping"] and time.monotonic() < deadline:
        time.sleep(0.001)
    created = faulty.calls["mem_create"]
    second.resize(8 * page)
    assert faulty.calls["mem_create"] == created
    assert not second.view().to_numpy().any()
    first.close()
    second.close()


def test_a_negative_recycle_limit_is_refused():
    from ringmem.virtual import set_recycle_limit

    with pytest.raises(InvalidValueError):
        set_recycle_limit(-1)


def test_the_mapping_thread_is_not_started_by_importing():
    import subprocess
    import sys

    code = (
        "import threading, ringmem.virtual; from ringmem.native import _native;"
        "assert not _native.mapping_thread_running();"
        "from ringmem.virtual import GrowableBuffer;"
        "b = GrowableBuffer(1 << 20, device='cpu', shape=1000); b.resize(0); b.settle();"
        "assert _native.mapping_thread_running()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_forked_child_is_refused(device, page):
    import os

    buffer = GrowableBuffer(8 * page, device=device, shape=page)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            buffer.resize(4 * page)
        except DriverError as error:
            code = 0 if "fork" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    buffer.resize(4 * page)
    buffer.close()


def test_it_cannot_be_pickled_and_says_what_can(device):
    buffer = GrowableBuffer(1000, device=device)
    with pytest.raises(NotSupportedError, match=r"ticket that share\(\) makes"):
        pickle.dumps(buffer)
    buffer.close()


@pytest.mark.parametrize("shape", [2.5, None, "a"])
def test_what_is_no_shape_is_refused_by_name(device, shape):
    buffer = GrowableBuffer(1000, device=device)
    with pytest.raises(InvalidValueError, match="shape is"):
        buffer.resize(shape)
    buffer.close()


def test_what_is_mapped_ahead_may_be_given_as_text(device, page):
    with GrowableBuffer(4 * page, device=device) as buffer:
        buffer.reserve_ahead(f"{page} B")
        buffer.settle()
        assert buffer.committed == page
        with pytest.raises(InvalidValueError, match="nbytes is 'much'"):
            buffer.reserve_ahead("much")


def test_numpy_sees_the_elements_and_holds_off_a_shrink(device):
    if not device.name.startswith("cpu"):
        pytest.skip("the host cannot read it")
    with GrowableBuffer((1000, 2), "float32", device, shape=3) as buffer:
        buffer.fill(7)
        array = np.asarray(buffer)
        assert array.tolist() == [[7.0, 7.0]] * 3
        with pytest.raises(InvalidValueError, match="live view"):
            buffer.resize(1)
        del array
