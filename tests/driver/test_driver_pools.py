"""The driver's own stream-ordered pools."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ringmem.native import _native as native
from ringmem.native.errors import OutOfMemoryError

if TYPE_CHECKING:
    from tests.driver.conftest import Kit, RunPeer

MiB = 1 << 20
Status = native.Status
Get = native.PoolAttribute
UNLIMITED = 2**64 - 1
pytestmark = pytest.mark.timeout(60, method="thread")


def reserved(kit: Kit, pool: int) -> int:
    return int(kit.driver.pool_get(0, pool, Get.reserved_current))


def used(kit: Kit, pool: int) -> int:
    return int(kit.driver.pool_get(0, pool, Get.used_current))


# --- allocating and freeing ----------------------------------------------------------------------


def test_a_block_is_usable_in_the_order_of_its_stream(kit: Kit) -> None:
    kit.require(native.Attribute.memory_pools)
    stream = kit.stream()
    ptr = kit.driver.mem_alloc_async(0, MiB, stream)
    kit.fill(ptr, 6, MiB, stream)
    data = kit.download(ptr, MiB, stream)
    kit.driver.mem_free_async(0, ptr, stream)
    kit.driver.stream_synchronize(0, stream)
    assert (data == 6).all()


def test_size_0_is_an_invalid_value(kit: Kit) -> None:
    pool = kit.pool()
    with kit.refused(Status.invalid_value):
        kit.driver.pool_alloc_async(0, pool, 0)
    with kit.refused(Status.invalid_value):
        kit.driver.mem_alloc_async(0, 0)


def test_a_second_free_is_an_invalid_value(kit: Kit) -> None:
    pool = kit.pool()
    ptr = kit.driver.pool_alloc_async(0, pool, MiB)
    kit.driver.mem_free_async(0, ptr)
    with kit.refused(Status.invalid_value):
        kit.driver.mem_free_async(0, ptr)


def test_the_default_pool_stays_the_same_and_is_current_at_first(kit: Kit) -> None:
    kit.require(native.Attribute.memory_pools)
    default = kit.driver.pool_default(0)
    assert default != 0
    assert kit.driver.pool_default(0) == default
    assert kit.driver.pool_current(0) == default


def test_mem_alloc_async_takes_from_the_current_pool(kit: Kit) -> None:
    pool = kit.pool()
    kit.driver.pool_set_current(0, pool)
    try:
        assert kit.driver.pool_current(0) == pool
        ptr = kit.driver.mem_alloc_async(0, MiB)
        assert used(kit, pool) >= MiB
        kit.driver.mem_free_async(0, ptr)
    finally:
        kit.driver.pool_set_current(0, kit.driver.pool_default(0))


def test_a_block_of_a_pool_may_be_freed_with_a_plain_free(kit: Kit) -> None:
    kit.require_host_driver("cuMemFree of an explicit pool's block breaks that pool on driver 580")
    pool = kit.pool()
    ptr = kit.driver.pool_alloc_async(0, pool, MiB)
    kit.driver.synchronize(0)
    kit.driver.mem_free(0, ptr)
    kit.driver.synchronize(0)
    assert used(kit, pool) == 0


# --- reuse ---------------------------------------------------------------------------------------


def test_a_freed_block_is_reused_at_once_on_its_own_stream(kit: Kit) -> None:
    pool = kit.pool()
    stream = kit.stream()
    gate = kit.gate(stream)
    first = kit.driver.pool_alloc_async(0, pool, 8 * MiB, stream)
    before = reserved(kit, pool)
    for _ in range(50):
        kit.driver.mem_free_async(0, first, stream)
        first = kit.driver.pool_alloc_async(0, pool, 8 * MiB, stream)
    assert reserved(kit, pool) == before
    kit.driver.mem_free_async(0, first, stream)
    gate.open()
    kit.driver.stream_synchronize(0, stream)


def test_another_stream_does_not_get_a_block_before_its_free_is_reached(kit: Kit) -> None:
    pool = kit.pool()
    kit.driver.pool_set(0, pool, Get.reuse_allow_internal_dependencies, 0)
    here, there = kit.stream(), kit.stream()
    first = kit.driver.pool_alloc_async(0, pool, 8 * MiB, here)
    gate = kit.gate(here)
    kit.driver.mem_free_async(0, first, here)
    second = kit.driver.pool_alloc_async(0, pool, 8 * MiB, there)
    assert not first <= second < first + 8 * MiB
    gate.open()
    kit.driver.mem_free_async(0, second, there)
    kit.driver.synchronize(0)


def test_what_a_block_held_is_not_overwritten_through_reuse_on_another_stream(kit: Kit) -> None:
    # With every kind of reuse allowed, the driver orders the streams where it must.
    pool = kit.pool()
    here, there = kit.stream(), kit.stream()
    kept = kit.pinned(MiB)
    first = kit.driver.pool_alloc_async(0, pool, MiB, here)
    kit.fill(first, 1, MiB, here)
    gate = kit.gate(here)
    kit.driver.copy_async(0, kept.ptr, first, MiB, here)
    kit.driver.mem_free_async(0, first, here)
    second = kit.driver.pool_alloc_async(0, pool, MiB, there)
    kit.fill(second, 2, MiB, there)
    gate.open()
    kit.driver.mem_free_async(0, second, there)
    kit.driver.synchronize(0)
    assert (kept.data == 1).all()


@pytest.mark.parametrize(
    "attribute",
    [
        Get.reuse_follow_event_dependencies,
        Get.reuse_allow_opportunistic,
        Get.reuse_allow_internal_dependencies,
    ],
)
def test_kinds_of_reuse_are_on_and_can_be_switched(kit: Kit, attribute: Get) -> None:
    pool = kit.pool()
    assert kit.driver.pool_get(0, pool, attribute) == 1
    kit.driver.pool_set(0, pool, attribute, 0)
    assert kit.driver.pool_get(0, pool, attribute) == 0
    kit.driver.pool_set(0, pool, attribute, 1)
    assert kit.driver.pool_get(0, pool, attribute) == 1


# --- keeping and giving back ---------------------------------------------------------------------


def test_a_pool_keeps_nothing_beyond_a_synchronization_by_default(kit: Kit) -> None:
    pool = kit.pool()
    assert kit.driver.pool_get(0, pool, Get.release_threshold) == 0
    ptr = kit.driver.pool_alloc_async(0, pool, 32 * MiB)
    kit.driver.mem_free_async(0, ptr)
    kit.driver.synchronize(0)
    assert reserved(kit, pool) == 0


def test_a_pool_keeps_what_the_threshold_allows_until_it_is_trimmed(kit: Kit) -> None:
    pool = kit.pool()
    kit.driver.pool_set(0, pool, Get.release_threshold, UNLIMITED)
    assert kit.driver.pool_get(0, pool, Get.release_threshold) == UNLIMITED
    ptr = kit.driver.pool_alloc_async(0, pool, 32 * MiB)
    kit.driver.mem_free_async(0, ptr)
    kit.driver.synchronize(0)
    assert reserved(kit, pool) >= 32 * MiB
    free = kit.driver.memory_info(0).free
    kit.driver.pool_trim(0, pool, 0)
    assert reserved(kit, pool) == 0
    assert kit.driver.memory_info(0).free >= free + 32 * MiB


def test_trimming_leaves_what_is_in_use(kit: Kit) -> None:
    pool = kit.pool()
    kit.driver.pool_set(0, pool, Get.release_threshold, UNLIMITED)
    live = kit.driver.pool_alloc_async(0, pool, 8 * MiB)
    kit.fill(live, 8, 8 * MiB)
    ptr = kit.driver.pool_alloc_async(0, pool, 64 * MiB)
    kit.driver.mem_free_async(0, ptr)
    kit.driver.synchronize(0)
    kit.driver.pool_trim(0, pool, 0)
    assert reserved(kit, pool) >= 8 * MiB
    assert (kit.download(live, 8 * MiB) == 8).all()
    kit.driver.mem_free_async(0, live)


def test_counters_and_high_water_marks(kit: Kit) -> None:
    pool = kit.pool()
    first = kit.driver.pool_alloc_async(0, pool, 4 * MiB)
    second = kit.driver.pool_alloc_async(0, pool, 4 * MiB)
    assert used(kit, pool) == 8 * MiB
    assert reserved(kit, pool) >= 8 * MiB
    kit.driver.mem_free_async(0, second)
    kit.driver.synchronize(0)
    assert used(kit, pool) == 4 * MiB
    assert kit.driver.pool_get(0, pool, Get.used_high) == 8 * MiB
    assert kit.driver.pool_get(0, pool, Get.reserved_high) >= 8 * MiB
    kit.driver.pool_set(0, pool, Get.used_high, 0)
    kit.driver.pool_set(0, pool, Get.reserved_high, 0)
    # From here on, or from 0: CUDA does not say.
    assert kit.driver.pool_get(0, pool, Get.used_high) in (0, 4 * MiB)
    assert kit.driver.pool_get(0, pool, Get.reserved_high) in (0, reserved(kit, pool))
    kit.driver.mem_free_async(0, first)


@pytest.mark.parametrize("attribute", [Get.used_high, Get.reserved_high])
def test_a_high_water_mark_can_only_be_set_to_0(kit: Kit, attribute: Get) -> None:
    pool = kit.pool()
    with kit.refused(Status.invalid_value):
        kit.driver.pool_set(0, pool, attribute, 5)


@pytest.mark.parametrize("attribute", [Get.used_current, Get.reserved_current])
def test_a_current_figure_cannot_be_set(kit: Kit, attribute: Get) -> None:
    pool = kit.pool()
    with kit.refused():
        kit.driver.pool_set(0, pool, attribute, 0)


def test_a_pool_with_a_maximum_runs_out_there(kit: Kit) -> None:
    pool = kit.pool(max_size=64 * MiB)
    first = kit.driver.pool_alloc_async(0, pool, 32 * MiB)
    with pytest.raises(OutOfMemoryError):
        kit.driver.pool_alloc_async(0, pool, 64 * MiB)
    kit.driver.mem_free_async(0, first)


def test_more_than_the_device_has_is_out_of_memory(kit: Kit) -> None:
    pool = kit.pool()
    with pytest.raises(OutOfMemoryError):
        kit.driver.pool_alloc_async(0, pool, kit.driver.memory_info(0).total + MiB)
    ptr = kit.driver.pool_alloc_async(0, pool, MiB)  # and no harm done
    kit.driver.mem_free_async(0, ptr)


def test_blocks_outlive_the_handle_of_their_pool(kit: Kit) -> None:
    # Documented for cuMemPoolDestroy; on driver 580.159, after an allocation that ran out of
    # memory, the next pool's first free makes the process hang or crash.
    kit.require_host_driver("destroying a pool with live blocks breaks later pools on driver 580")
    kit.require(native.Attribute.memory_pools)
    pool = kit.driver.pool_create(0, native.PoolProps())
    ptr = kit.driver.pool_alloc_async(0, pool, MiB)
    kit.driver.pool_destroy(0, pool)
    kit.fill(ptr, 3, MiB)
    assert (kit.download(ptr, MiB) == 3).all()
    kit.driver.mem_free_async(0, ptr)
    kit.driver.synchronize(0)


def test_the_default_pool_cannot_be_destroyed(kit: Kit) -> None:
    kit.require(native.Attribute.memory_pools)
    with kit.refused():
        kit.driver.pool_destroy(0, kit.driver.pool_default(0))


def test_the_driver_knows_the_blocks_of_a_pool(kit: Kit) -> None:
    pool = kit.pool()
    ptr = kit.driver.pool_alloc_async(0, pool, 3 * MiB)
    info = kit.driver.pointer_info(0, ptr + MiB)
    assert info.kind == native.PointerKind.device
    assert (info.device, info.device_ptr) == (0, ptr + MiB)
    kit.driver.mem_free_async(0, ptr)


# --- access and sharing --------------------------------------------------------------------------


def test_only_the_owner_has_access_until_it_is_granted(kit: Kit) -> None:
    pool = kit.pool()
    access = native.Access
    assert kit.driver.pool_get_access(0, pool, native.Location(id=0)) == access.readwrite
    kit.require_peers()
    peer = native.Location(id=1)
    assert kit.driver.pool_get_access(0, pool, peer) == access.none
    kit.driver.pool_set_access(0, pool, [(peer, access.readwrite)])
    assert kit.driver.pool_get_access(0, pool, peer) == access.readwrite
    ptr = kit.driver.pool_alloc_async(0, pool, MiB)
    kit.driver.synchronize(0)
    kit.fill(ptr, 7, MiB, device=1)
    assert (kit.download(ptr, MiB, device=1) == 7).all()
    kit.driver.mem_free_async(0, ptr)
    kit.driver.synchronize(0)
    kit.driver.pool_set_access(0, pool, [(peer, access.none)])
    assert kit.driver.pool_get_access(0, pool, peer) == access.none


def test_the_owners_access_cannot_be_taken(kit: Kit) -> None:
    pool = kit.pool()
    with kit.refused():
        kit.driver.pool_set_access(0, pool, [(native.Location(id=0), native.Access.none)])


def test_a_pool_that_is_not_shareable_cannot_be_exported(kit: Kit) -> None:
    pool = kit.pool()
    with kit.refused():
        kit.driver.pool_export(0, pool)


POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, a bit of mempool_handle_types


def test_a_pool_and_a_block_of_it_reach_another_process(kit: Kit, run_peer: RunPeer) -> None:
    kit.require(native.Attribute.memory_pools)
    if not kit.attribute(native.Attribute.mempool_handle_types) & POSIX_FD:
        pytest.skip("the device lacks the capability mempool_handle_types: posix_fd")
    pool = kit.pool(shareable=True)
    ptr = kit.driver.pool_alloc_async(0, pool, MiB)
    kit.fill(ptr, 0x21, MiB)
    kit.driver.synchronize(0)
    fd = kit.driver.pool_export(0, pool)
    exported = kit.driver.pool_export_pointer(0, ptr)
    assert len(exported) == 64
    run_peer("pool", [fd], MiB, 0x21, 0x43, exported.hex())
    os.close(fd)
    assert (kit.download(ptr, MiB) == 0x43).all()
    kit.driver.mem_free_async(0, ptr)
    kit.driver.synchronize(0)


def test_a_device_without_pools_says_so(host: Kit) -> None:
    driver = native.HostDriver("pools=0")
    assert driver.attribute(0, native.Attribute.memory_pools) == 0
    for call in (
        lambda: driver.mem_alloc_async(0, MiB),
        lambda: driver.pool_create(0, native.PoolProps()),
        lambda: driver.pool_default(0),
    ):
        with host.refused(Status.not_supported):
            call()
