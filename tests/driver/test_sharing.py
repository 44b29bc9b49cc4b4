"""Physical memory as a file descriptor: in this process and in another one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ringmem.native import _native as native

if TYPE_CHECKING:
    from tests.driver.conftest import Kit, RunPeer

MiB = 1 << 20
Status = native.Status
pytestmark = pytest.mark.timeout(60, method="thread")


@pytest.fixture
def shareable(kit: Kit) -> dict[str, object]:
    kit.require(native.Attribute.virtual_memory_management)
    kit.require(native.Attribute.handle_type_posix_fd)
    return {"shareable": True}


def test_an_imported_handle_is_the_same_memory(kit: Kit, shareable: dict[str, object]) -> None:
    grain = kit.granularity(**shareable)
    here, there = kit.reserve(grain), kit.reserve(grain)
    handle = kit.physical(grain, **shareable)
    fd = kit.driver.mem_export(handle)
    imported = kit.driver.mem_import(fd)
    kit.cleanup.callback(kit.driver.mem_release, imported)
    os.fstat(fd)  # the descriptor stays the caller's
    os.close(fd)
    kit.map(here, grain, handle)
    kit.map(there, grain, imported)
    data = kit.pattern(grain)
    kit.upload(here, data)
    assert (kit.download(there, grain) == data).all()


def test_an_exported_descriptor_keeps_the_memory(kit: Kit, shareable: dict[str, object]) -> None:
    grain = kit.granularity(**shareable)
    ptr = kit.reserve(grain)
    handle = kit.driver.mem_create(grain, native.PhysicalProps(**shareable))
    kit.driver.mem_map(ptr, grain, handle)
    kit.grant(ptr, grain)
    kit.fill(ptr, 0x42, grain)
    kit.driver.synchronize(0)
    fd = kit.driver.mem_export(handle)
    kit.driver.mem_unmap(ptr, grain)
    kit.driver.mem_release(handle)
    imported = kit.driver.mem_import(fd)
    os.close(fd)
    kit.cleanup.callback(kit.driver.mem_release, imported)
    kit.map(ptr, grain, imported)
    assert (kit.download(ptr, grain) == 0x42).all()


def test_another_process_reads_and_writes_shared_memory(
    kit: Kit, shareable: dict[str, object], run_peer: RunPeer
) -> None:
    grain = kit.granularity(**shareable)
    ptr = kit.reserve(3 * grain)
    handles = [kit.physical(grain, **shareable) for _ in range(3)]
    for index, handle in enumerate(handles):
        kit.map(ptr + index * grain, grain, handle)
    kit.fill(ptr, 0x11, 3 * grain)
    kit.driver.synchronize(0)
    fds = [kit.driver.mem_export(handle) for handle in handles]
    run_peer("memory", fds, grain, 0x11, 0x22)
    for fd in fds:
        os.close(fd)
    assert (kit.download(ptr, 3 * grain) == 0x22).all()


def test_what_was_not_made_shareable_is_not_exported(kit: Kit) -> None:
    handle = kit.physical(kit.granularity())
    with kit.refused():
        kit.driver.mem_export(handle)


def test_a_descriptor_of_something_else_is_not_imported(
    kit: Kit, shareable: dict[str, object]
) -> None:
    with open(os.devnull, "rb") as other, kit.refused():
        kit.driver.mem_import(other.fileno())
    with kit.refused():
        kit.driver.mem_import(-1)


def test_devices_without_virtual_memory_or_export_say_so(host: Kit) -> None:
    driver = native.HostDriver("virtual_memory=0")
    assert driver.attribute(0, native.Attribute.virtual_memory_management) == 0
    with host.refused(Status.not_supported):
        driver.mem_create(2 * MiB, native.PhysicalProps())
    with host.refused(Status.not_supported):
        driver.address_reserve(2 * MiB)
    driver = native.HostDriver(export=False)
    assert driver.attribute(0, native.Attribute.handle_type_posix_fd) == 0
    with host.refused(Status.not_supported, Status.invalid_value):
        driver.mem_create(2 * MiB, native.PhysicalProps(shareable=True))
