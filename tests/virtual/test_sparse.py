import pickle

import numpy as np
import pytest

import ringmem
from ringmem import (
    ClosedError,
    DriverError,
    InvalidValueError,
    NotSupportedError,
    OutOfMemoryError,
)
from ringmem.native import _native
from ringmem.virtual import GrowableBuffer, SparseBuffer

from .conftest import fill_now


@pytest.fixture
def sparse(device, page):
    buffer = SparseBuffer(64 * page, "uint8", device, cache_nbytes=0)
    yield buffer
    if not buffer.closed:
        buffer.close()


def test_pages_come_and_go_and_the_others_keep_their_bytes(sparse, page):
    sparse.map([0, 2, 1, 10])
    assert sparse.mapped == [range(3), range(10, 11)]
    for number in (0, 1, 2, 10):
        sparse.view(number * page, (number + 1) * page).fill(number + 1)
    sparse.unmap(1)
    sparse.settle()
    assert sparse.mapped == [range(1), range(2, 3), range(10, 11)]
    assert sparse.committed == 3 * page
    for number in (0, 2, 10):
        rows = sparse.view(number * page, (number + 1) * page).to_numpy()
        assert np.all(rows == number + 1)


def test_contiguous_pages_are_one_access_and_one_unmap_call(sparse, faulty):
    access = faulty.calls["mem_set_access"]
    sparse.map([*range(8), *range(20, 24)])
    assert faulty.calls["mem_set_access"] == access + 2
    unmaps = faulty.calls["mem_unmap"]
    sparse.unmap(range(8))
    sparse.settle()
    assert faulty.calls["mem_unmap"] == unmaps + 1


@pytest.mark.parametrize("pages", [[64], [-1], [3, 3], range(60, 70), [2**64], [1, 0, 1]])
def test_pages_that_cannot_be_are_refused(sparse, pages):
    with pytest.raises((InvalidValueError, TypeError)):
        sparse.map(pages)
    assert sparse.mapped == []


def test_mapping_twice_and_unmapping_what_is_not_mapped_change_nothing(sparse):
    sparse.map(range(4))
    with pytest.raises(InvalidValueError, match="mapped already"):
        sparse.map([8, 3])
    with pytest.raises(InvalidValueError, match="not mapped"):
        sparse.unmap([0, 4])
    assert sparse.mapped == [range(4)]


def test_rows_name_their_pages(device, page):
    with SparseBuffer((page, 6), "float32", device) as buffer:
        assert buffer.page_nbytes == page
        assert list(buffer.pages_of(0, 1)) == [0]
        assert buffer.pages_of(0, page) == range(24)
        last = page // 24
        assert list(buffer.pages_of(last, last + 1)) == [0, 1]
        with pytest.raises(InvalidValueError, match="start"):
            buffer.pages_of(4, 4)


def test_a_view_needs_its_pages_and_keeps_them(sparse, page):
    sparse.map(range(2))
    with pytest.raises(InvalidValueError, match="not mapped"):
        sparse.view(page, 3 * page)
    view = sparse.view(page // 2, 2 * page)
    with pytest.raises(InvalidValueError, match="view"):
        sparse.unmap(1)
    with pytest.raises(InvalidValueError, match="view"):
        sparse.close()
    view.fill(1)
    del view
    sparse.unmap(1)


def test_a_page_in_use_leaves_when_its_work_is_done(page):
    device = ringmem.devices_of(_native.HostDriver(f"granularity={page},latency_s=0.1"))[0]
    with SparseBuffer(8 * page, "uint8", device, cache_nbytes=0) as buffer:
        stream = device.create_stream()
        buffer.map(range(4))
        buffer.view(0, 4 * page).fill(8, stream=stream)
        buffer.unmap(range(4), streams=stream)
        assert buffer.committed == 4 * page
        buffer.map(2)  # called off: it comes back with its bytes
        buffer.settle()
        assert buffer.mapped == [range(2, 3)]
        assert buffer.committed == page
        assert np.all(buffer.view(2 * page, 3 * page).to_numpy() == 8)


def test_pages_larger_than_the_granularity(device, page):
    with SparseBuffer(16 * page, "uint8", device, page_nbytes=4 * page) as buffer:
        assert buffer.page_count == 4
        buffer.map([1])
        buffer.view(4 * page, 8 * page).fill(1)
    with pytest.raises(InvalidValueError, match="page_nbytes"):
        SparseBuffer(16 * page, "uint8", device, page_nbytes=page + 1)
    with pytest.raises(InvalidValueError, match="cache_nbytes"):
        SparseBuffer(16 * page, "uint8", device, cache_nbytes=-1)


def test_unmapped_pages_fault(page):
    driver = _native.HostDriver(f"granularity={page}")
    device = ringmem.devices_of(driver)[0]
    buffer = SparseBuffer(8 * page, "uint8", device)
    buffer.map(0)
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        fill_now(device, buffer.ptr, 2 * page)


def test_in_guard_mode_unmapped_pages_read_zero(device, page):
    driver = device.driver
    with SparseBuffer(8 * page, "uint8", device, read_zero=True, cache_nbytes=0) as buffer:

        def bytes_now():
            target = np.empty(8 * page, np.uint8)
            driver.copy_async(0, target.ctypes.data, buffer.ptr, target.nbytes, 0)
            device.synchronize()
            return target[::page].tolist()

        assert bytes_now() == [0] * 8
        buffer.map([2, 3])
        buffer.view(2 * page, 4 * page).fill(9)
        assert bytes_now() == [0, 0, 9, 9, 0, 0, 0, 0]
        buffer.unmap(2)
        buffer.settle()
        assert bytes_now() == [0, 0, 0, 9, 0, 0, 0, 0]
        assert buffer.committed == 2 * page


def test_in_guard_mode_writes_still_fault(page):
    driver = _native.HostDriver(f"granularity={page}")
    device = ringmem.devices_of(driver)[0]
    buffer = SparseBuffer(8 * page, "uint8", device, read_zero=True)
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        fill_now(device, buffer.ptr, 16)


def test_running_out_maps_nothing(device, page):
    with (
        GrowableBuffer(1 << 26, device=device, shape=(64 << 20) - 4 * page),
        SparseBuffer(64 * page, "uint8", device) as buffer,
    ):
        with pytest.raises(OutOfMemoryError):
            buffer.map(range(8))
        assert buffer.mapped == []
        buffer.map(range(4))


def test_the_mapping_limit_is_met_before_it_is_hit(device, page):
    from ringmem.virtual import live_mappings

    with SparseBuffer(64 * page, "uint8", device) as buffer:
        _native.set_mapping_limit(live_mappings() + 10)
        try:
            buffer.map(range(10))
            with pytest.raises(OutOfMemoryError, match="mapping"):
                buffer.map([20])
        finally:
            _native.set_mapping_limit(0)
        buffer.map([20])


def test_cached_pages_save_driver_calls(device, faulty, page):
    with SparseBuffer(64 * page, "uint8", device, cache_nbytes=4 * page) as buffer:
        buffer.map(range(8))
        buffer.unmap(range(8))
        buffer.settle()
        assert buffer.committed == 4 * page
        created = faulty.calls["mem_create"]
        buffer.map(range(10, 14))
        assert faulty.calls["mem_create"] == created


def test_use_after_close_is_an_error(sparse):
    sparse.map(1)
    sparse.close()
    sparse.close()
    for use in (lambda: sparse.map(2), lambda: sparse.ptr, lambda: sparse.unmap(1)):
        with pytest.raises(ClosedError):
            use()


def test_it_cannot_be_pickled_and_says_what_can(device, page):
    buffer = SparseBuffer(page, device=device)
    with pytest.raises(NotSupportedError, match="to_numpy"):
        pickle.dumps(buffer)
    buffer.close()
