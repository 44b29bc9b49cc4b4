"""What a real device leaves undefined and the host driver defines: an access that is not allowed
is a sticky error of the device, never a crash and never a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from ringmem.native import _native as native
from ringmem.native.errors import DriverError, InvalidValueError

if TYPE_CHECKING:
    from tests.driver.conftest import Kit

MiB = 1 << 20
GRAIN = 2 * MiB
Status = native.Status
Access = native.Access
pytestmark = pytest.mark.timeout(60, method="thread")

Work = Callable[["Kit", int], None]
BAD_WORK: dict[str, Work] = {
    "a fill": lambda kit, ptr: kit.fill(ptr, 1, 4096),
    "a copy to it": lambda kit, ptr: kit.driver.copy_async(0, ptr, kit.alloc(4096), 4096),
    "a copy from it": lambda kit, ptr: kit.driver.copy_async(0, kit.alloc(4096), ptr, 4096),
    "a 2-D copy": lambda kit, ptr: kit.driver.copy_2d_async(0, kit.alloc(4096), 64, ptr, 64, 32, 8),
}


def outcome(kit: Kit, work: Callable[[], None], device: int = 0) -> int:
    """The error of this work, from the call or from the synchronization after it; 0 for none."""
    try:
        work()
        kit.driver.synchronize(device)
    except DriverError as error:
        return error.code or -1
    return 0


@pytest.mark.parametrize("work", BAD_WORK.values(), ids=BAD_WORK.keys())
def test_work_on_reserved_memory_that_is_not_mapped_fails(host: Kit, work: Work) -> None:
    ptr = host.reserve(GRAIN)
    assert outcome(host, lambda: work(host, ptr)) in (
        Status.illegal_address.value,
        Status.invalid_value.value,
    )


@pytest.mark.parametrize("work", BAD_WORK.values(), ids=BAD_WORK.keys())
def test_work_on_mapped_memory_without_access_fails(host: Kit, work: Work) -> None:
    ptr = host.reserve(GRAIN)
    host.map(ptr, GRAIN, host.physical(GRAIN), access=False)
    assert outcome(host, lambda: work(host, ptr)) in (
        Status.illegal_address.value,
        Status.invalid_value.value,
    )


def test_writing_read_only_memory_fails_and_reading_does_not(host: Kit) -> None:
    ptr, aside = host.reserve(GRAIN), host.reserve(GRAIN)
    handle = host.physical(GRAIN)
    host.map(aside, GRAIN, handle)
    host.fill(aside, 7, GRAIN)
    host.map(ptr, GRAIN, handle, access=False)
    host.grant(ptr, GRAIN, Access.read)
    assert (host.download(ptr, 4096) == 7).all()
    assert outcome(host, lambda: host.fill(ptr, 1, 4096)) == Status.illegal_address.value
    fresh = native.HostDriver()  # another device is well
    ptr = fresh.mem_alloc(0, 4096)
    fresh.fill_async(0, ptr, 1, 1, 4096)
    fresh.synchronize(0)


def test_the_error_is_sticky_for_its_device_and_only_for_that(host: Kit) -> None:
    ptr = host.reserve(GRAIN)
    other = host.driver.mem_alloc(1, 4096)
    assert outcome(host, lambda: host.fill(ptr, 1, 4096)) == Status.illegal_address.value
    for call in (
        lambda: host.driver.synchronize(0),
        lambda: host.driver.mem_alloc(0, 4096),
        lambda: host.driver.stream_create(0),
        lambda: host.driver.stream_query(0, 0),
        lambda: host.driver.memory_info(0),
    ):
        with host.refused(Status.illegal_address):
            call()
    host.driver.fill_async(1, other, 1, 1, 4096)
    host.driver.synchronize(1)
    host.driver.mem_free(1, other)


def test_a_device_does_not_reach_anothers_memory_without_peer_access(host: Kit) -> None:
    ptr = host.driver.mem_alloc(1, 4096)
    assert outcome(host, lambda: host.fill(ptr, 1, 4096, device=0)) == Status.illegal_address.value


def test_freed_memory_is_out_of_bounds(host: Kit) -> None:
    ptr = host.driver.mem_alloc(0, 64 * MiB)
    assert host.driver.check_access(0, ptr, 64 * MiB, write=True)
    host.driver.mem_free(0, ptr)
    assert not host.driver.check_access(0, ptr, 1)


def test_check_access_answers_for_each_device_and_direction(host: Kit) -> None:
    ptr = host.reserve(2 * GRAIN)
    host.map(ptr, GRAIN, host.physical(GRAIN), access=False)
    assert not host.driver.check_access(0, ptr, GRAIN)
    host.grant(ptr, GRAIN, Access.read)
    assert host.driver.check_access(0, ptr, GRAIN)
    assert not host.driver.check_access(0, ptr, GRAIN, write=True)
    assert not host.driver.check_access(0, ptr, GRAIN + 1)  # the next page is not mapped
    assert not host.driver.check_access(1, ptr, GRAIN)


def test_a_device_that_is_gone_makes_no_driver_hang() -> None:
    driver = native.HostDriver()
    stream = driver.stream_create(0)
    flag = driver.host_alloc(0, 64)
    driver.stream_wait_value(0, stream, driver.host_device_pointer(0, flag), 1)
    driver.launch_host_function(0, stream, lambda: None)
    del driver  # with work that never gets its turn


def test_a_driver_waits_for_a_host_function_that_wants_the_gil() -> None:
    ran = []
    driver = native.HostDriver(latency_s=0.05)
    driver.launch_host_function(0, 0, lambda: ran.append(1))
    del driver
    assert ran == [1]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("devices=0", "devices is 0: give a number of devices from 1 to 32"),
        ("devices=many", "devices is many: give"),
        ("capacity=1XiB", "capacity is 1XiB: give"),
        ("latency_s=-1", "latency_s is -1.* give 0 to 3600 seconds"),
        ("latency_s=", "latency_s is empty: give"),
        ("colour=red", "colour is red: no such setting; give one of devices, capacity"),
        ("devices", '"devices" has no value: give key=value'),
    ],
)
def test_a_wrong_setting_is_named(settings: str, named: str) -> None:
    with pytest.raises(InvalidValueError, match=named):
        native.HostDriver(settings)


def test_settings_come_as_text_and_as_keywords() -> None:
    for driver in (
        native.HostDriver("devices=3,capacity=64MiB,strict=1"),
        native.HostDriver(devices=3, capacity=64 * MiB, strict=True),
        native.HostDriver("devices=1,capacity=64MiB", devices=3, strict=True),
    ):
        assert driver.device_count() == 3
        assert driver.memory_info(2).total == 64 * MiB
