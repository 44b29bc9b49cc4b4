import itertools
import os

import numpy as np
import pytest

from ringmem import (
    ClosedError,
    DriverError,
    InvalidDeviceError,
    InvalidValueError,
    NotSupportedError,
    OutOfMemoryError,
    devices_of,
)
from ringmem.native import _native
from ringmem.virtual import (
    AddressRange,
    HostNode,
    MappedRange,
    PhysicalMemory,
    allocation_granularity,
    live_mappings,
    mapping_limit,
)

from .conftest import fill_now


def test_granularity_is_that_of_the_device(device, page):
    assert allocation_granularity(device) == page
    assert allocation_granularity(device, recommended=True) >= page
    assert allocation_granularity(HostNode(0, device)) % 4096 == 0


def test_sizes_in_bytes_are_rounded_up_to_pages(device, page):
    with (
        PhysicalMemory.create(device, page + 1) as memory,
        AddressRange.reserve(device, 1) as addresses,
    ):
        assert memory.nbytes == 2 * page
        assert addresses.nbytes == page


def test_offsets_must_be_pages_inside_the_range(device, page):
    with (
        PhysicalMemory.create(device, page) as memory,
        AddressRange.reserve(device, 4 * page) as addresses,
    ):
        for offset in (1, page - 1, -page, 4 * page, 2**64 - page):
            with pytest.raises(InvalidValueError, match="offset"):
                addresses.map(memory, offset)
        assert addresses.mappings == 0


@pytest.mark.parametrize("nbytes", [0, -1, 2**63, 2**64, 2**64 - 1])
def test_impossible_sizes_are_refused(device, nbytes):
    with pytest.raises((InvalidValueError, OutOfMemoryError)):
        PhysicalMemory.create(device, nbytes)
    with pytest.raises((InvalidValueError, OutOfMemoryError)):
        AddressRange.reserve(device, nbytes)


@pytest.mark.parametrize("alignment", [3, -4096, 6])
def test_an_alignment_is_a_power_of_two(device, page, alignment):
    with pytest.raises(InvalidValueError, match="alignment"):
        AddressRange.reserve(device, page, alignment)


def test_a_range_is_aligned_as_asked(device, page):
    with AddressRange.reserve(device, page, 16 * page) as addresses:
        assert addresses.ptr % (16 * page) == 0


def test_overlap_is_refused_and_neighbours_are_not(device, page):
    memory = PhysicalMemory.create(device, 2 * page)
    addresses = AddressRange.reserve(device, 6 * page)
    middle = addresses.map(memory, 2 * page)
    for offset in (page, 2 * page, 3 * page):
        with pytest.raises(InvalidValueError, match="overlap"):
            addresses.map(memory, offset)
    before, after = addresses.map(memory, 0), addresses.map(memory, 4 * page)
    middle.unmap()
    again = addresses.map(memory, 2 * page)
    for mapping in (before, after, again):
        mapping.unmap()
    memory.close()
    addresses.close()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_closing_in_any_order_releases_everything_leaf_first(device, faulty, page, order):
    memory = PhysicalMemory.create(device, page)
    addresses = AddressRange.reserve(device, 2 * page)
    first, second = addresses.map(memory, 0), addresses.map(memory, page)
    steps = [memory.close, addresses.close, first.unmap, second.unmap]
    for index in order:
        steps[index]()
        steps[index]()
    assert sum(faulty.live.values()) == 0
    with pytest.raises(ClosedError):
        _ = memory.handle
    with pytest.raises(ClosedError):
        _ = addresses.ptr
    with pytest.raises(ClosedError):
        _ = first.ptr
    with pytest.raises(ClosedError):
        first.set_access({device: "read"})


def test_a_mapping_keeps_what_it_stands_on(device, page):
    mapping = AddressRange.reserve(device, page).map(PhysicalMemory.create(device, page))
    view = mapping.view(16, "int32")
    view.fill(7)
    assert view.to_numpy().tolist() == [7] * 16


def test_two_addresses_of_one_memory_are_the_same_bytes(device, page):
    memory = PhysicalMemory.create(device, page)
    addresses = AddressRange.reserve(device, 2 * page)
    first, second = addresses.map(memory, 0), addresses.map(memory, page)
    first.view(8, "uint8").fill(9)
    assert second.view(8, "uint8").to_numpy().tolist() == [9] * 8


def test_a_mapping_with_a_view_is_not_unmapped(device, page):
    mapping = AddressRange.reserve(device, page).map(PhysicalMemory.create(device, page))
    view = mapping.view()
    with pytest.raises(InvalidValueError, match="view"):
        mapping.unmap()
    view.fill(1)
    del view
    mapping.unmap()


def test_views_do_not_reach_beyond_the_mapping(device, page):
    mapping = AddressRange.reserve(device, 2 * page).map(PhysicalMemory.create(device, page))
    assert mapping.view(dtype="float32").shape == (page // 4,)
    with pytest.raises(InvalidValueError, match="shape"):
        mapping.view(page + 1)
    with pytest.raises(InvalidValueError, match="shape"):
        mapping.view((-1,))


def test_access_is_what_was_granted_for_each_device(pair, page):
    first, second = pair
    addresses = AddressRange.reserve(first, page)
    mapping = addresses.map(
        PhysicalMemory.create(first, page), access={first: "readwrite", second: "read"}
    )
    assert mapping.get_access(first) == "readwrite"
    assert mapping.get_access(second) == "read"
    mapping.set_access({second: "none"})
    assert mapping.get_access(second) == "none"
    with pytest.raises(InvalidValueError, match="access"):
        mapping.set_access({second: "write"})


def test_a_device_without_access_faults(page):
    driver = _native.HostDriver(f"devices=2,granularity={page}")
    first, second = devices_of(driver)
    mapping = AddressRange.reserve(first, page).map(PhysicalMemory.create(first, page))
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        fill_now(second, mapping.ptr, page)


def test_a_device_that_cannot_reach_is_refused(page):
    first, second = devices_of(_native.HostDriver(f"devices=2,peers=none,granularity={page}"))
    addresses = AddressRange.reserve(first, page)
    memory = PhysicalMemory.create(first, page)
    with pytest.raises(NotSupportedError, match="cannot access"):
        addresses.map(memory, access={first: "readwrite", second: "read"})
    mapping = addresses.map(memory)
    with pytest.raises(NotSupportedError, match="cannot access"):
        mapping.set_access({second: "read"})
    assert mapping.get_access(first) == "readwrite"


def test_devices_of_different_drivers_do_not_mix(device, page):
    other = devices_of(_native.HostDriver(f"granularity={page}"))[0]
    addresses = AddressRange.reserve(device, page)
    with pytest.raises(InvalidValueError, match="driver"):
        addresses.map(PhysicalMemory.create(other, page))
    with pytest.raises(InvalidDeviceError, match="simulation.*give a device of the driver"):
        addresses.map(PhysicalMemory.create(device, page), access={other: "read"})


@pytest.mark.parametrize(
    ("config", "call"),
    [
        ("virtual_memory=0", lambda d: AddressRange.reserve(d, 1)),
        ("virtual_memory=0", lambda d: PhysicalMemory.create(d, 1)),
        ("virtual_memory=0", allocation_granularity),
        ("export=0", lambda d: PhysicalMemory.create(d, 1)),
        ("host_numa=0", lambda d: PhysicalMemory.create(HostNode(0, d), 1)),
        ("devices=1", lambda d: PhysicalMemory.create(d, 1, rdma=True)),
    ],
)
def test_what_a_device_cannot_do_is_not_supported(config, call):
    device = devices_of(_native.HostDriver(config))[0]
    with pytest.raises(NotSupportedError):
        call(device)


def test_memory_without_export_says_so(device):
    with (
        PhysicalMemory.create(device, 1, shareable=False) as memory,
        pytest.raises(NotSupportedError, match="shareable"),
    ):
        memory.export_fd()


def test_memory_of_a_host_node_is_mapped_for_the_device(device, page):
    memory = PhysicalMemory.create(HostNode(0, device), page)
    mapping = AddressRange.reserve(device, page).map(memory)
    view = mapping.view(4, "uint8")
    view.fill(3)
    assert view.to_numpy().tolist() == [3] * 4


def test_running_out_of_memory_is_typed_and_says_how_much(device, page):
    with pytest.raises(OutOfMemoryError, match="free"):
        PhysicalMemory.create(device, 128 << 20)


def test_an_exported_descriptor_is_the_callers_and_keeps_the_memory(device, page):
    memory = PhysicalMemory.create(device, page)
    addresses = AddressRange.reserve(device, 2 * page)
    mapping = addresses.map(memory)
    mapping.view(1).fill(42)
    device.synchronize()
    fd = memory.export_fd()
    mapping.unmap()
    memory.close()
    imported = PhysicalMemory.import_fd(fd, page, device)
    os.fstat(fd)  # still open: importing leaves it with the caller
    os.close(fd)
    again = addresses.map(imported, page)
    assert again.view(1).to_numpy()[0] == 42


def test_descriptors_that_are_none_are_refused(device, page):
    with pytest.raises(InvalidValueError, match="fd"):
        PhysicalMemory.import_fd(-1, page, device)
    with open(os.devnull) as file, pytest.raises(DriverError):
        PhysicalMemory.import_fd(file.fileno(), page, device)
    read, write = os.pipe()
    try:
        with pytest.raises(DriverError):
            PhysicalMemory.import_fd(read, page, device)
    finally:
        os.close(read)
        os.close(write)


def test_an_import_of_the_wrong_size_cannot_be_mapped(device, page):
    memory = PhysicalMemory.create(device, page)
    fd = memory.export_fd()
    wrong = PhysicalMemory.import_fd(fd, 2 * page, device)
    os.close(fd)
    with pytest.raises(DriverError):
        AddressRange.reserve(device, 2 * page).map(wrong)
    with pytest.raises(InvalidValueError, match="nbytes"):
        PhysicalMemory.import_fd(0, page + 1, device)


def test_unmap_waits_for_the_streams_it_is_given(page):
    device = devices_of(_native.HostDriver(f"granularity={page},latency_s=0.05"))[0]
    stream = device.create_stream()
    mapping = AddressRange.reserve(device, page).map(PhysicalMemory.create(device, page))
    view = mapping.view()
    view.fill(1, stream=stream)
    del view
    mapping.unmap(streams=[stream])
    assert stream.query()
    stream.synchronize()  # and nothing faulted


def test_unmap_waits_for_events(page):
    device = devices_of(_native.HostDriver(f"granularity={page},latency_s=0.05"))[0]
    stream = device.create_stream()
    mapping = AddressRange.reserve(device, page).map(PhysicalMemory.create(device, page))
    view = mapping.view()
    view.fill(1, stream=stream)
    event = stream.record()
    del view
    mapping.unmap(streams=[event])
    assert event.query()


def test_live_mappings_are_counted_and_bounded(device, page):
    assert mapping_limit(device) > 1000
    before = live_mappings()
    memory = PhysicalMemory.create(device, page)
    addresses = AddressRange.reserve(device, 8 * page)
    _native.set_mapping_limit(before + 2)
    try:
        kept = [addresses.map(memory, 0), addresses.map(memory, page)]
        with pytest.raises(OutOfMemoryError, match="mapping"):
            addresses.map(memory, 2 * page)
    finally:
        _native.set_mapping_limit(0)
    assert live_mappings() == before + 2
    kept[0].unmap()
    del kept
    assert live_mappings() == before


def test_a_failed_map_leaves_room_for_the_next(device, faulty, page):
    addresses = AddressRange.reserve(device, page)
    memory = PhysicalMemory.create(device, page)
    for operation in ("mem_map", "mem_set_access"):
        faulty.fail(operation)
        with pytest.raises(DriverError):
            addresses.map(memory)
        assert addresses.mappings == 0
        assert memory.mappings == 0
    view = addresses.map(memory).view(4)
    view.fill(1)
    assert np.all(view.to_numpy() == 1)


def test_what_its_makers_make_is_not_made_by_hand(device, page):
    for wrong, instead in (
        (
            lambda: PhysicalMemory(page, device=device),
            r"use PhysicalMemory\.create\(device, nbytes\)",
        ),
        (lambda: PhysicalMemory(device, page), r"use PhysicalMemory\.create"),
        (lambda: AddressRange(page, device), r"use AddressRange\.reserve\(device, nbytes\)"),
        (lambda: MappedRange(page, None, None), r"use AddressRange\.map\(physical\)"),
    ):
        with pytest.raises(InvalidValueError, match=instead):
            wrong()
