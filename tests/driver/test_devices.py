"""Devices: how many there are, what they are and what they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ringmem.native import _native as native
from ringmem.native.errors import DriverError, InvalidDeviceError

if TYPE_CHECKING:
    from tests.driver.conftest import Kit

MiB = 1 << 20
pytestmark = pytest.mark.timeout(60, method="thread")


def test_there_is_a_device_and_a_driver_of_cuda_12_or_newer(kit: Kit) -> None:
    assert kit.driver.device_count() >= 1
    assert kit.driver.driver_version() >= 12000


def test_a_device_has_a_name_and_a_uuid_of_its_own(kit: Kit) -> None:
    infos = [kit.driver.device_info(n) for n in range(kit.driver.device_count())]
    assert all(info.name for info in infos)
    assert len({info.uuid for info in infos}) == len(infos)
    prefix = "CPU-" if kit.is_host else "GPU-"
    for info in infos:
        assert info.uuid.startswith(prefix)
        groups = info.uuid.removeprefix(prefix).split("-")
        assert [len(group) for group in groups] == [8, 4, 4, 4, 12]
        int("".join(groups), 16)


@pytest.mark.parametrize("attribute", list(native.Attribute))
def test_every_attribute_has_a_value(kit: Kit, attribute: native.Attribute) -> None:
    # The newest attributes may be unknown to an older driver.
    try:
        value = kit.attribute(attribute)
    except DriverError:
        assert not kit.is_host
        assert kit.driver.driver_version() < 13000
    else:
        assert isinstance(value, int)


def test_unified_addressing_is_there(kit: Kit) -> None:
    assert kit.attribute(native.Attribute.unified_addressing) == 1
    assert kit.attribute(native.Attribute.can_map_host_memory) == 1


def test_memory_info_falls_and_rises_with_allocation(kit: Kit) -> None:
    nbytes = 64 * MiB
    before = kit.driver.memory_info(0)
    assert 0 < before.free <= before.total
    ptr = kit.driver.mem_alloc(0, nbytes)
    during = kit.driver.memory_info(0)
    kit.driver.mem_free(0, ptr)
    after = kit.driver.memory_info(0)
    assert during.total == before.total
    assert before.free - during.free >= nbytes
    assert after.free - during.free >= nbytes


def test_synchronize_waits_for_all_streams_of_the_device(kit: Kit) -> None:
    streams = [kit.stream() for _ in range(3)]
    memory = [kit.alloc(MiB) for _ in streams]
    for stream, ptr in zip(streams, memory, strict=True):
        kit.fill(ptr, 7, MiB, stream)
    kit.driver.synchronize(0)
    assert all(kit.driver.stream_query(0, stream) for stream in streams)


def test_the_primary_context_is_a_handle_on_cuda_and_0_on_the_cpu(kit: Kit) -> None:
    context = kit.driver.primary_context(0)
    assert (context == 0) is kit.is_host
    assert kit.driver.primary_context(0) == context


@pytest.mark.parametrize("device", [-1, 64])
def test_a_device_that_is_not_there_is_an_invalid_device(kit: Kit, device: int) -> None:
    driver = kit.driver
    location = native.Location(id=device)
    for call in (
        lambda: driver.device_info(device),
        lambda: driver.attribute(device, native.Attribute.l2_cache_size),
        lambda: driver.memory_info(device),
        lambda: driver.synchronize(device),
        lambda: driver.primary_context(device),
        lambda: driver.mem_alloc(device, 64),
        lambda: driver.host_alloc(device, 64),
        lambda: driver.managed_alloc(device, 64),
        lambda: driver.mem_alloc_async(device, 64),
        lambda: driver.pool_default(device),
        lambda: driver.pool_current(device),
        lambda: driver.stream_create(device),
        lambda: driver.event_create(device),
        lambda: driver.copy_peer_async(0, 4096, device, 4096, 0),
        lambda: driver.peer_can_access(0, device),
        lambda: driver.peer_enable(device, 0),
        lambda: driver.granularity(native.PhysicalProps(location)),
        lambda: driver.mem_create(2 * MiB, native.PhysicalProps(location)),
    ):
        with pytest.raises(InvalidDeviceError):
            call()


# --- peers ---------------------------------------------------------------------------------------


def test_a_device_is_no_peer_of_itself(kit: Kit) -> None:
    assert kit.driver.peer_can_access(0, 0) is False
    with kit.refused():
        kit.driver.peer_enable(0, 0)


def test_peer_access_is_enabled_once_and_disabled_once(kit: Kit) -> None:
    kit.require_peers()
    status = native.Status
    with kit.refused(status.peer_access_not_enabled):
        kit.driver.peer_disable(0, 1)
    kit.driver.peer_enable(0, 1)
    with kit.refused(status.peer_access_already_enabled):
        kit.driver.peer_enable(0, 1)
    kit.driver.peer_disable(0, 1)
    with kit.refused(status.peer_access_not_enabled):
        kit.driver.peer_disable(0, 1)


def test_devices_that_are_not_connected_cannot_be_peers(host: Kit) -> None:
    driver = native.HostDriver("devices=3,peers=0-1")
    assert driver.peer_can_access(0, 1)
    assert driver.peer_can_access(1, 0)
    assert not driver.peer_can_access(0, 2)
    with host.refused(native.Status.peer_access_unsupported, native.Status.invalid_device):
        driver.peer_enable(0, 2)


def test_a_peer_copy_needs_no_peer_access(kit: Kit) -> None:
    if kit.driver.device_count() < 2:
        pytest.skip("needs two devices")
    source, target = kit.alloc(MiB, device=0), kit.alloc(MiB, device=1)
    data = kit.pattern(MiB)
    kit.upload(source, data)
    stream = kit.stream(device=1)
    kit.driver.copy_peer_async(1, target, 0, source, MiB, stream)
    kit.driver.stream_synchronize(1, stream)
    assert (kit.download(target, MiB, device=1) == data).all()


def test_an_enabled_peer_may_be_copied_from_directly(kit: Kit) -> None:
    kit.require_peers()
    source, target = kit.alloc(MiB, device=0), kit.alloc(MiB, device=1)
    data = kit.pattern(MiB)
    kit.upload(source, data)
    kit.driver.peer_enable(1, 0)
    stream = kit.stream(device=1)
    kit.driver.copy_async(1, target, source, MiB, stream)
    kit.driver.stream_synchronize(1, stream)
    kit.driver.peer_disable(1, 0)
    assert (kit.download(target, MiB, device=1) == data).all()
