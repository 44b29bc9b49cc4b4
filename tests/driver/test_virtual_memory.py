"""Virtual memory: address ranges, physical memory, mappings and access."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from ringmem.native import _native as native
from ringmem.native.errors import NotSupportedError, OutOfMemoryError

if TYPE_CHECKING:
    from tests.driver.conftest import Kit

MiB = 1 << 20
Status = native.Status
Access = native.Access
DEVICE = native.Location(id=0)
pytestmark = pytest.mark.timeout(60, method="thread")


# --- reserving -----------------------------------------------------------------------------------


def test_the_granularity_is_a_power_of_two_and_no_more_than_recommended(kit: Kit) -> None:
    minimum = kit.granularity()
    recommended = kit.driver.granularity(native.PhysicalProps(), recommended=True)
    assert minimum > 0
    assert minimum & (minimum - 1) == 0
    assert recommended % minimum == 0


@pytest.mark.parametrize("alignment", [0, 1 << 21, 1 << 24, 1 << 30])
def test_a_range_is_aligned_as_asked(kit: Kit, alignment: int) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(3 * grain, alignment)
    assert ptr != 0
    assert ptr % max(alignment, grain) == 0


def test_a_range_larger_than_the_memory_costs_none(kit: Kit) -> None:
    kit.granularity()
    before = kit.driver.memory_info(0)
    kit.reserve(16 * before.total // (2 * MiB) * (2 * MiB))
    assert kit.driver.memory_info(0).free == before.free


def test_ranges_do_not_overlap(kit: Kit) -> None:
    grain = kit.granularity()
    ranges = sorted(kit.reserve(4 * grain) for _ in range(5))
    assert all(b - a >= 4 * grain for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("excess", [1, -1])
def test_a_range_is_a_multiple_of_the_granularity(kit: Kit, excess: int) -> None:
    grain = kit.granularity()
    with kit.refused(Status.invalid_value):
        kit.driver.address_reserve(2 * grain + excess)


def test_a_range_of_size_0_is_an_invalid_value(kit: Kit) -> None:
    kit.granularity()
    with kit.refused(Status.invalid_value):
        kit.driver.address_reserve(0)


def test_an_alignment_that_is_no_power_of_two_is_an_invalid_value(kit: Kit) -> None:
    grain = kit.granularity()
    with kit.refused(Status.invalid_value):
        kit.driver.address_reserve(grain, alignment=3 * grain)


def test_a_hint_that_is_taken_is_no_error(kit: Kit) -> None:
    grain = kit.granularity()
    first = kit.reserve(grain)
    second = kit.driver.address_reserve(grain, hint=first)
    assert second != first
    kit.driver.address_free(second, grain)


def test_a_range_is_freed_whole_and_once(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.driver.address_reserve(4 * grain)
    for wrong in ((ptr, 2 * grain), (ptr + grain, 3 * grain), (ptr, 8 * grain)):
        with kit.refused(Status.invalid_value):
            kit.driver.address_free(*wrong)
    kit.driver.address_free(ptr, 4 * grain)
    with kit.refused(Status.invalid_value):
        kit.driver.address_free(ptr, 4 * grain)


def test_a_range_with_mappings_is_not_freed(host: Kit) -> None:
    grain = host.granularity()
    ptr = host.reserve(grain)
    host.map(ptr, grain, host.physical(grain))
    with host.refused():
        host.driver.address_free(ptr, grain)
    host.fill(ptr, 1, grain)
    assert (host.download(ptr, grain) == 1).all()


# --- physical memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, -1])
def test_physical_memory_is_a_multiple_of_the_granularity(kit: Kit, nbytes: int) -> None:
    grain = kit.granularity()
    with kit.refused(Status.invalid_value):
        kit.driver.mem_create(grain + nbytes if nbytes else 0, native.PhysicalProps())


def test_physical_memory_is_charged_when_made_and_returned_when_released(kit: Kit) -> None:
    kit.granularity()
    before = kit.driver.memory_info(0).free
    handle = kit.driver.mem_create(64 * MiB, native.PhysicalProps())
    assert handle != 0
    assert before - kit.driver.memory_info(0).free >= 64 * MiB
    kit.driver.mem_release(handle)
    assert kit.driver.memory_info(0).free >= before - 2 * MiB


def test_more_physical_memory_than_there_is_is_out_of_memory(kit: Kit) -> None:
    grain = kit.granularity()
    total = kit.driver.memory_info(0).total // grain * grain
    with pytest.raises(OutOfMemoryError) as caught:
        kit.driver.mem_create(total + grain, native.PhysicalProps())
    assert caught.value.operation == "cuMemCreate"


def test_a_handle_is_released_once(host: Kit) -> None:
    handle = host.driver.mem_create(host.granularity(), native.PhysicalProps())
    host.driver.mem_release(handle)
    with host.refused():
        host.driver.mem_release(handle)


def test_fresh_physical_memory_can_be_written_throughout(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(grain)
    kit.map(ptr, grain, kit.physical(grain))
    data = kit.pattern(grain)
    kit.upload(ptr, data)
    assert (kit.download(ptr, grain) == data).all()


# --- mapping -------------------------------------------------------------------------------------


def test_a_released_handle_lives_while_it_is_mapped(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(32 * grain)
    before = kit.driver.memory_info(0).free
    handle = kit.driver.mem_create(32 * grain, native.PhysicalProps())
    kit.driver.mem_map(ptr, 32 * grain, handle)
    kit.driver.mem_release(handle)
    kit.grant(ptr, 32 * grain)
    kit.fill(ptr, 5, grain)
    assert (kit.download(ptr, grain) == 5).all()
    assert before - kit.driver.memory_info(0).free >= 32 * grain
    kit.driver.mem_unmap(ptr, 32 * grain)
    assert kit.driver.memory_info(0).free >= before - 2 * MiB


def test_a_handle_can_be_mapped_again_after_unmapping_with_its_data(kit: Kit) -> None:
    grain = kit.granularity()
    here, there = kit.reserve(grain), kit.reserve(grain)
    handle = kit.physical(grain)
    kit.driver.mem_map(here, grain, handle)
    kit.grant(here, grain)
    data = kit.pattern(grain)
    kit.upload(here, data)
    kit.driver.mem_unmap(here, grain)
    kit.map(there, grain, handle)
    assert (kit.download(there, grain) == data).all()


def test_two_mappings_of_a_handle_are_the_same_memory(kit: Kit) -> None:
    grain = kit.granularity()
    here, there = kit.reserve(grain), kit.reserve(grain)
    handle = kit.physical(grain)
    kit.map(here, grain, handle)
    kit.map(there, grain, handle)
    data = kit.pattern(grain)
    kit.upload(here, data)
    assert (kit.download(there, grain) == data).all()
    kit.fill(there, 0x77, 4096)
    assert (kit.download(here, 4096) == 0x77).all()


def test_handles_side_by_side_are_one_run_of_memory(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(3 * grain)
    for index in range(3):
        kit.map(ptr + index * grain, grain, kit.physical(grain), access=False)
    kit.grant(ptr, 3 * grain)  # one call over all
    data = kit.pattern(3 * grain)
    kit.upload(ptr, data)
    assert (kit.download(ptr, 3 * grain) == data).all()


def test_one_unmap_takes_several_whole_mappings(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(4 * grain)
    handle = kit.physical(grain)
    for index in range(4):
        kit.driver.mem_map(ptr + index * grain, grain, handle)
    kit.driver.mem_unmap(ptr, 3 * grain)
    kit.driver.mem_map(ptr, grain, handle)  # free again
    kit.driver.mem_unmap(ptr, grain)
    kit.driver.mem_unmap(ptr + 3 * grain, grain)


def test_no_part_of_a_mapping_is_unmapped(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(4 * grain)
    kit.map(ptr, 4 * grain, kit.physical(4 * grain))
    data = kit.pattern(4 * grain)
    kit.upload(ptr, data)
    for part in ((ptr, grain), (ptr + grain, grain), (ptr + grain, 3 * grain), (ptr, 3 * grain)):
        with kit.refused(Status.invalid_value):
            kit.driver.mem_unmap(*part)
    assert (kit.download(ptr, 4 * grain) == data).all()


def test_unmapping_what_is_not_mapped_is_an_error(kit: Kit) -> None:
    kit.require_host_driver("driver 580 unmaps nothing and says it succeeded")
    grain = kit.granularity()
    ptr = kit.reserve(2 * grain)
    with kit.refused(Status.invalid_value, Status.not_mapped, Status.unmap_failed):
        kit.driver.mem_unmap(ptr, grain)


def test_a_handle_is_mapped_whole(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(4 * grain)
    handle = kit.physical(2 * grain)
    with kit.refused(Status.invalid_value, Status.not_supported):
        kit.driver.mem_map(ptr, 4 * grain, handle)
    kit.map(ptr, 2 * grain, handle)


def test_nothing_is_mapped_outside_a_range(kit: Kit) -> None:
    kit.require_host_driver("driver 580 maps across the end of a reservation into the next one")
    grain = kit.granularity()
    ptr = kit.reserve(2 * grain)
    handle = kit.physical(2 * grain)
    with kit.refused(Status.invalid_value):
        kit.driver.mem_map(ptr + grain, 2 * grain, handle)


def test_nothing_is_mapped_over_a_mapping(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(2 * grain)
    kit.map(ptr, 2 * grain, kit.physical(2 * grain))
    kit.fill(ptr, 1, 2 * grain)
    other = kit.physical(grain)
    with kit.refused(Status.invalid_value, Status.already_mapped):
        kit.driver.mem_map(ptr + grain, grain, other)
    assert (kit.download(ptr, 2 * grain) == 1).all()


def test_an_address_within_a_page_is_not_mapped(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(4 * grain)
    handle = kit.physical(grain)
    with kit.refused(Status.invalid_value):
        kit.driver.mem_map(ptr + 4096, grain, handle)


def test_a_remapped_range_shows_the_new_memory_in_stream_order(kit: Kit) -> None:
    grain = kit.granularity()
    ptr, aside = kit.reserve(grain), kit.reserve(2 * grain)
    old, new = kit.physical(grain), kit.physical(grain)
    kit.map(aside, grain, old)
    kit.map(aside + grain, grain, new)
    kit.fill(aside, 1, grain)
    kit.fill(aside + grain, 2, grain)
    kit.driver.mem_map(ptr, grain, old)
    kit.grant(ptr, grain)
    assert (kit.download(ptr, grain) == 1).all()
    kit.driver.mem_unmap(ptr, grain)
    kit.map(ptr, grain, new)
    assert (kit.download(ptr, grain) == 2).all()


def test_no_operation_of_virtual_memory_waits_for_a_stream(kit: Kit) -> None:
    grain = kit.granularity()
    stream = kit.stream()
    gate = kit.gate(stream)
    ptr = kit.driver.address_reserve(grain)
    handle = kit.driver.mem_create(grain, native.PhysicalProps())
    kit.driver.mem_map(ptr, grain, handle)
    kit.grant(ptr, grain)
    kit.driver.mem_unmap(ptr, grain)
    kit.driver.mem_release(handle)
    kit.driver.address_free(ptr, grain)
    assert not kit.driver.stream_query(0, stream)
    gate.open()
    kit.driver.stream_synchronize(0, stream)


# --- access --------------------------------------------------------------------------------------


def test_a_fresh_mapping_has_no_access_and_then_what_was_set(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(grain)
    kit.map(ptr, grain, kit.physical(grain), access=False)
    assert kit.driver.mem_get_access(ptr, DEVICE) == Access.none
    kit.grant(ptr, grain, Access.readwrite)
    assert kit.driver.mem_get_access(ptr, DEVICE) == Access.readwrite
    assert kit.driver.mem_get_access(ptr + grain - 1, DEVICE) == Access.readwrite


def test_each_mapping_of_a_handle_has_access_of_its_own(kit: Kit) -> None:
    grain = kit.granularity()
    here, there = kit.reserve(grain), kit.reserve(grain)
    handle = kit.physical(grain)
    kit.map(here, grain, handle)
    kit.map(there, grain, handle, access=False)
    assert kit.driver.mem_get_access(here, DEVICE) == Access.readwrite
    assert kit.driver.mem_get_access(there, DEVICE) == Access.none


def test_read_only_memory_can_be_read(kit: Kit) -> None:
    grain = kit.granularity()
    here, there = kit.reserve(grain), kit.reserve(grain)
    handle = kit.physical(grain)
    kit.map(here, grain, handle)
    kit.fill(here, 9, grain)
    kit.driver.synchronize(0)
    kit.map(there, grain, handle, access=False)
    try:
        kit.grant(there, grain, Access.read)
    except NotSupportedError:
        assert not kit.is_host
        pytest.skip("the device lacks read-only access to physical memory")
    assert kit.driver.mem_get_access(there, DEVICE) == Access.read
    assert (kit.download(there, grain) == 9).all()


def test_access_is_set_on_mapped_memory_only(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(2 * grain)
    with kit.refused():
        kit.grant(ptr, grain)
    kit.map(ptr, grain, kit.physical(grain))
    with kit.refused():
        kit.grant(ptr, 2 * grain)  # the second half is not mapped
    assert kit.driver.mem_get_access(ptr, DEVICE) == Access.readwrite


def test_access_of_unmapped_memory_is_not_to_be_had(host: Kit) -> None:
    grain = host.granularity()
    ptr = host.reserve(grain)
    with host.refused():
        host.driver.mem_get_access(ptr, DEVICE)


def test_access_for_nobody_is_an_invalid_value(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(grain)
    kit.map(ptr, grain, kit.physical(grain), access=False)
    with kit.refused(Status.invalid_value):
        kit.driver.mem_set_access(ptr, grain, [])


def test_a_peer_reads_and_writes_what_it_was_granted(kit: Kit) -> None:
    kit.require_peers()
    grain = kit.granularity()
    ptr = kit.reserve(grain)
    kit.map(ptr, grain, kit.physical(grain))
    kit.grant(ptr, grain, Access.readwrite, device=1)
    kit.fill(ptr, 3, grain, device=1)
    kit.driver.synchronize(1)
    assert (kit.download(ptr, grain) == 3).all()
    assert kit.driver.mem_get_access(ptr, native.Location(id=1)) == Access.readwrite


def test_physical_memory_on_the_host_is_mapped_for_both_sides(kit: Kit) -> None:
    kit.require(native.Attribute.virtual_memory_management)
    kit.require(native.Attribute.host_numa_virtual_memory_management)
    node = max(kit.attribute(native.Attribute.host_numa_id), 0)
    place = native.Location(native.LocationKind.host_numa, node)
    grain = kit.driver.granularity(native.PhysicalProps(place))
    ptr = kit.reserve(grain)
    free = kit.driver.memory_info(0).free
    kit.map(ptr, grain, kit.physical(grain, location=place), access=False)
    assert free - kit.driver.memory_info(0).free < grain  # none of the device's
    kit.driver.mem_set_access(ptr, grain, [(DEVICE, Access.readwrite), (place, Access.readwrite)])
    data = kit.view(ptr, grain)
    data[:] = 4
    assert (kit.download(ptr, grain) == 4).all()
    kit.fill(ptr, 6, grain)
    kit.driver.synchronize(0)
    assert (data == 6).all()


# --- references ----------------------------------------------------------------------------------


def test_a_retained_handle_is_a_reference_of_its_own(kit: Kit) -> None:
    grain = kit.granularity()
    ptr, other = kit.reserve(grain), kit.reserve(grain)
    handle = kit.driver.mem_create(grain, native.PhysicalProps())
    kit.driver.mem_map(ptr, grain, handle)
    kit.grant(ptr, grain)
    kit.fill(ptr, 8, grain)
    kit.driver.synchronize(0)
    retained = kit.driver.mem_retain(ptr + 100)
    kit.driver.mem_release(handle)
    kit.driver.mem_unmap(ptr, grain)
    kit.driver.mem_map(other, grain, retained)
    kit.driver.mem_release(retained)
    kit.grant(other, grain)
    assert (kit.download(other, grain) == 8).all()
    kit.driver.mem_unmap(other, grain)


def test_nothing_is_retained_where_nothing_is_mapped(kit: Kit) -> None:
    ptr = kit.reserve(kit.granularity())
    with kit.refused():
        kit.driver.mem_retain(ptr)


def test_the_driver_knows_mapped_memory(kit: Kit) -> None:
    grain = kit.granularity()
    ptr = kit.reserve(2 * grain)
    kit.map(ptr, grain, kit.physical(grain))
    info = kit.driver.pointer_info(0, ptr + 4097)
    assert info.kind == native.PointerKind.device
    assert (info.device, info.device_ptr) == (0, ptr + 4097)
    if info.nbytes:
        assert info.base <= ptr + 4097 < info.base + info.nbytes
