"""Device, pinned and registered memory, and what the driver says about an address."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ringmem.native import _native as native
from ringmem.native.errors import DriverError, OutOfMemoryError

if TYPE_CHECKING:
    from tests.driver.conftest import Kit

MiB = 1 << 20
Status = native.Status
Kind = native.PointerKind
pytestmark = pytest.mark.timeout(60, method="thread")


# --- device memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 255, 256, 4096, 3 * MiB + 17])
def test_device_memory_keeps_what_is_written(kit: Kit, nbytes: int) -> None:
    ptr = kit.alloc(nbytes)
    data = kit.pattern(nbytes)
    kit.upload(ptr, data)
    assert (kit.download(ptr, nbytes) == data).all()


def test_blocks_are_aligned_and_do_not_overlap(kit: Kit) -> None:
    sizes = [1, 100, 256, 5000, MiB, 7]
    blocks = sorted((kit.alloc(nbytes), nbytes) for nbytes in sizes)
    assert all(ptr % 256 == 0 for ptr, _ in blocks)
    for (ptr, nbytes), (next_ptr, _) in itertools.pairwise(blocks):
        assert ptr + nbytes <= next_ptr


def test_size_0_is_an_invalid_value(kit: Kit) -> None:
    with kit.refused(Status.invalid_value):
        kit.driver.mem_alloc(0, 0)


def test_more_than_there_is_is_out_of_memory_and_costs_nothing(kit: Kit) -> None:
    before = kit.driver.memory_info(0)
    with pytest.raises(OutOfMemoryError) as caught:
        kit.driver.mem_alloc(0, before.total + MiB)
    assert caught.value.operation == "cuMemAlloc"
    assert f"nbytes={before.total + MiB}" in str(caught.value)
    # Other users of the device may give memory back meanwhile.
    assert kit.driver.memory_info(0).free >= before.free


def test_running_out_is_real_and_ends_with_a_free(host: Kit) -> None:
    blocks = [host.driver.mem_alloc(0, 100 * MiB) for _ in range(10)]
    with pytest.raises(OutOfMemoryError):
        host.driver.mem_alloc(0, 100 * MiB)  # of 1 GiB
    host.driver.mem_free(0, blocks.pop())
    blocks.append(host.driver.mem_alloc(0, 100 * MiB))
    for block in blocks:
        host.driver.mem_free(0, block)
    info = host.driver.memory_info(0)
    assert info.free == info.total


def test_a_second_free_is_an_invalid_value(kit: Kit) -> None:
    ptr = kit.driver.mem_alloc(0, MiB)
    kit.driver.mem_free(0, ptr)
    with kit.refused(Status.invalid_value):
        kit.driver.mem_free(0, ptr)


def test_freeing_the_inside_of_a_block_is_an_invalid_value(kit: Kit) -> None:
    ptr = kit.alloc(MiB)
    with kit.refused(Status.invalid_value):
        kit.driver.mem_free(0, ptr + 256)
    kit.fill(ptr, 1, MiB)  # still there


def test_freeing_waits_for_work_that_uses_the_block(kit: Kit) -> None:
    ptr = kit.driver.mem_alloc(0, MiB)
    stream = kit.stream()
    kit.fill(ptr, 9, MiB, stream)
    kit.driver.mem_free(0, ptr)
    assert kit.driver.stream_query(0, stream)


# --- pinned memory -------------------------------------------------------------------------------


def test_pinned_memory_is_the_same_for_both_sides(kit: Kit) -> None:
    memory = kit.pinned(4096)
    device_memory = kit.alloc(4096)
    memory.data[:] = kit.pattern(4096)
    kit.driver.copy_async(0, device_memory, memory.device_ptr, 4096)
    kit.fill(memory.device_ptr, 0xAB, 4096)
    kit.driver.stream_synchronize(0, 0)
    assert (memory.data == 0xAB).all()
    assert (kit.download(device_memory, 4096) == kit.pattern(4096)).all()


def test_host_device_pointer_of_an_inner_address_keeps_the_offset(kit: Kit) -> None:
    memory = kit.pinned(4096)
    assert kit.driver.host_device_pointer(0, memory.ptr + 100) == memory.device_ptr + 100


def test_write_combined_memory_can_be_written_by_the_host(kit: Kit) -> None:
    ptr = kit.driver.host_alloc(0, 4096, write_combined=True)
    kit.view(ptr, 4096)[:] = 5
    target = kit.alloc(4096)
    kit.driver.copy_async(0, target, ptr, 4096)
    kit.driver.stream_synchronize(0, 0)
    kit.driver.host_free(0, ptr)
    assert (kit.download(target, 4096) == 5).all()


def test_pinned_size_0_is_an_invalid_value_or_nothing(kit: Kit) -> None:
    try:
        made = kit.driver.host_alloc(0, 0)
    except DriverError as error:
        made = error.code
    assert made in (0, Status.invalid_value.value)


def test_host_free_of_something_else_is_an_invalid_value(kit: Kit) -> None:
    array = np.zeros(4096, np.uint8)
    with kit.refused(Status.invalid_value):
        kit.driver.host_free(0, array.ctypes.data)


def test_host_free_twice_is_an_invalid_value(kit: Kit) -> None:
    ptr = kit.driver.host_alloc(0, 4096)
    kit.driver.host_free(0, ptr)
    with kit.refused(Status.invalid_value):
        kit.driver.host_free(0, ptr)


# --- registered memory ---------------------------------------------------------------------------


@pytest.fixture
def pages() -> tuple[int, np.ndarray]:
    """64 KiB of ordinary memory that starts at a page, and its address."""
    array = np.frombuffer(mmap.mmap(-1, 1 << 16), dtype=np.uint8)
    return array.ctypes.data, array


def test_registered_memory_is_the_same_for_both_sides(
    kit: Kit, pages: tuple[int, np.ndarray]
) -> None:
    kit.require(native.Attribute.host_register_supported)
    ptr, array = pages
    kit.driver.host_register(0, ptr, array.nbytes)
    device_ptr = kit.driver.host_device_pointer(0, ptr)
    kit.fill(device_ptr, 0x5A, array.nbytes)
    kit.driver.synchronize(0)
    assert (array == 0x5A).all()
    assert kit.driver.pointer_info(0, ptr).kind == Kind.pinned
    kit.driver.host_unregister(0, ptr)
    assert kit.driver.pointer_info(0, ptr).kind == Kind.unregistered
    assert (array == 0x5A).all()  # it stays the owner's memory


def test_memory_is_registered_once_and_unregistered_once(
    kit: Kit, pages: tuple[int, np.ndarray]
) -> None:
    kit.require(native.Attribute.host_register_supported)
    ptr, array = pages
    kit.driver.host_register(0, ptr, array.nbytes)
    with kit.refused(Status.host_memory_already_registered):
        kit.driver.host_register(0, ptr, array.nbytes)
    kit.driver.host_unregister(0, ptr)
    with kit.refused(Status.host_memory_not_registered):
        kit.driver.host_unregister(0, ptr)


def test_registering_nothing_is_an_invalid_value(kit: Kit, pages: tuple[int, np.ndarray]) -> None:
    kit.require(native.Attribute.host_register_supported)
    with kit.refused(Status.invalid_value):
        kit.driver.host_register(0, pages[0], 0)


def test_a_device_without_registration_says_so(host: Kit, pages: tuple[int, np.ndarray]) -> None:
    driver = native.HostDriver("host_register=0")
    assert driver.attribute(0, native.Attribute.host_register_supported) == 0
    with host.refused(Status.not_supported):
        driver.host_register(0, pages[0], 4096)


# --- what an address is --------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 100_000, MiB - 1])
def test_an_address_inside_device_memory_tells_its_block(kit: Kit, offset: int) -> None:
    ptr = kit.alloc(MiB)
    info = kit.driver.pointer_info(0, ptr + offset)
    assert info.kind == Kind.device
    assert info.device == 0
    assert info.device_ptr == ptr + offset
    assert info.base == ptr
    assert info.nbytes >= MiB
    if not kit.is_host:
        assert info.host_ptr == 0  # not there for the host; a CPU device may say otherwise


def test_the_device_of_an_address_is_its_owners(kit: Kit) -> None:
    for device in range(kit.driver.device_count()):
        ptr = kit.alloc(4096, device)
        assert kit.driver.pointer_info(0, ptr).device == device


def test_an_address_inside_pinned_memory_tells_both_addresses(kit: Kit) -> None:
    memory = kit.pinned(MiB)
    info = kit.driver.pointer_info(0, memory.ptr + 4097)
    assert info.kind == Kind.pinned
    assert info.host_ptr == memory.ptr + 4097
    assert info.device_ptr == memory.device_ptr + 4097


def test_ordinary_memory_is_unregistered_and_no_error(kit: Kit) -> None:
    array = np.zeros(100, np.uint8)
    for address in (array.ctypes.data, array.ctypes.data + 50, ctypes.addressof(ctypes.c_int())):
        info = kit.driver.pointer_info(0, address)
        assert (info.kind, info.base, info.nbytes) == (Kind.unregistered, 0, 0)


def test_freed_memory_is_unregistered(kit: Kit) -> None:
    ptr = kit.driver.mem_alloc(0, 64 * MiB)
    kit.driver.mem_free(0, ptr)
    assert kit.driver.pointer_info(0, ptr).kind == Kind.unregistered
