"""Managed memory: one address for both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ringmem.native import _native as native

if TYPE_CHECKING:
    from tests.driver.conftest import Kit

MiB = 1 << 20
Status = native.Status
HOST = native.Location(native.LocationKind.host)
pytestmark = pytest.mark.timeout(60, method="thread")


def test_managed_memory_is_the_same_for_both_sides(kit: Kit) -> None:
    ptr = kit.managed(MiB)
    data = kit.view(ptr, MiB)
    data[:] = kit.pattern(MiB)
    assert (kit.download(ptr, MiB) == kit.pattern(MiB)).all()
    kit.fill(ptr, 3, MiB)
    kit.driver.synchronize(0)
    assert (data == 3).all()


def test_the_driver_knows_managed_memory(kit: Kit) -> None:
    ptr = kit.managed(MiB)
    info = kit.driver.pointer_info(0, ptr + 5000)
    assert info.kind == native.PointerKind.managed
    assert info.device_ptr == info.host_ptr == ptr + 5000


def test_managed_size_0_is_an_invalid_value(kit: Kit) -> None:
    kit.require(native.Attribute.managed_memory)
    with kit.refused(Status.invalid_value):
        kit.driver.managed_alloc(0, 0)


@pytest.mark.parametrize("location", [native.Location(), HOST])
def test_prefetching_moves_nothing_that_one_sees(kit: Kit, location: native.Location) -> None:
    kit.require(native.Attribute.concurrent_managed_access)
    ptr = kit.managed(4 * MiB)
    kit.view(ptr, 4 * MiB)[:] = kit.pattern(4 * MiB)
    stream = kit.stream()
    kit.driver.prefetch(0, ptr, 4 * MiB, location, stream)
    kit.driver.stream_synchronize(0, stream)
    assert (kit.view(ptr, 4 * MiB) == kit.pattern(4 * MiB)).all()


def test_prefetching_beyond_the_block_is_an_invalid_value(kit: Kit) -> None:
    kit.require(native.Attribute.concurrent_managed_access)
    if not kit.is_host and kit.attribute(native.Attribute.pageable_memory_access):
        pytest.skip("with pageable_memory_access, what lies beyond may be prefetched too")
    ptr = kit.managed(MiB)
    with kit.refused(Status.invalid_value):
        kit.driver.prefetch(0, ptr, 256 * MiB, native.Location())


def test_prefetching_device_memory_is_an_invalid_value(kit: Kit) -> None:
    kit.require(native.Attribute.concurrent_managed_access)
    ptr = kit.alloc(MiB)
    with kit.refused(Status.invalid_value):
        kit.driver.prefetch(0, ptr, MiB, native.Location())


@pytest.mark.parametrize("advice", list(native.Advice))
def test_every_advice_is_taken(kit: Kit, advice: native.Advice) -> None:
    kit.require(native.Attribute.concurrent_managed_access)
    ptr = kit.managed(2 * MiB)
    kit.driver.advise(0, ptr, 2 * MiB, advice, native.Location())
    kit.view(ptr, 2 * MiB)[:] = 1
    assert (kit.download(ptr, 2 * MiB) == 1).all()


def test_advice_on_device_memory_is_an_invalid_value(kit: Kit) -> None:
    kit.require(native.Attribute.concurrent_managed_access)
    ptr = kit.alloc(2 * MiB)
    with kit.refused(Status.invalid_value):
        kit.driver.advise(0, ptr, 2 * MiB, native.Advice.set_read_mostly, native.Location())


@pytest.mark.parametrize("default_stream", [False, True])
def test_discarded_memory_may_be_written_again(kit: Kit, default_stream: bool) -> None:
    kit.require(native.Attribute.concurrent_managed_access)
    if kit.driver.driver_version() < 13000:
        pytest.skip("the driver lacks cuMemDiscardBatchAsync (CUDA 13.0)")
    ptr = kit.managed(4 * MiB)
    kit.view(ptr, 4 * MiB)[:] = 1
    stream = 0 if default_stream else kit.stream()
    kit.driver.discard(0, ptr, 4 * MiB, stream)
    # CUDA wants a prefetch before a discarded range is used again.
    kit.driver.prefetch(0, ptr, 4 * MiB, native.Location(), stream)
    kit.fill(ptr, 2, 4 * MiB, stream)
    kit.driver.stream_synchronize(0, stream)
    assert (kit.view(ptr, 4 * MiB) == 2).all()


def test_attaching_to_a_stream_and_back(kit: Kit) -> None:
    kit.require(native.Attribute.managed_memory)
    ptr = kit.managed(MiB)
    stream = kit.stream()
    kit.driver.stream_attach(0, stream, ptr, 0, native.ManagedAttach.single)
    kit.fill(ptr, 4, MiB, stream)
    kit.driver.stream_synchronize(0, stream)
    assert (kit.view(ptr, MiB) == 4).all()
    kit.driver.stream_attach(0, stream, ptr, 0, native.ManagedAttach.global_)
    kit.driver.stream_synchronize(0, stream)


def test_a_device_without_managed_memory_says_so(host: Kit) -> None:
    driver = native.HostDriver("managed=0")
    assert driver.attribute(0, native.Attribute.managed_memory) == 0
    with host.refused(Status.not_supported):
        driver.managed_alloc(0, MiB)


def test_a_freed_managed_block_is_gone(kit: Kit) -> None:
    kit.require(native.Attribute.managed_memory)
    ptr = kit.driver.managed_alloc(0, MiB)
    kit.driver.mem_free(0, ptr)
    with kit.refused(Status.invalid_value):
        kit.driver.mem_free(0, ptr)
