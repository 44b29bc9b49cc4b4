"""FaultyDriver: failing chosen calls, delaying them, counting what is alive."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ringmem.native import _native as native
from ringmem.native.errors import (
    DriverError,
    InvalidValueError,
    NotSupportedError,
    OutOfMemoryError,
)

MiB = 1 << 20
Status = native.Status
Props = native.PhysicalProps
pytestmark = pytest.mark.timeout(60, method="thread")


@pytest.fixture
def faulty() -> native.FaultyDriver:
    return native.FaultyDriver(native.HostDriver("devices=2,capacity=1GiB"))


def alive(faulty: native.FaultyDriver) -> dict[str, int]:
    return {kind: count for kind, count in faulty.live.items() if count}


# --- as a driver ---------------------------------------------------------------------------------


def test_it_answers_as_the_driver_inside(faulty: native.FaultyDriver) -> None:
    assert faulty.platform == "cpu"
    assert faulty.device_count() == 2
    assert faulty.memory_info(0).total == 1 << 30
    assert faulty.device_info(1).uuid == faulty.driver.device_info(1).uuid


def test_the_list_of_operations_is_that_of_the_driver(faulty: native.FaultyDriver) -> None:
    operations = native.FaultyDriver.operations
    assert len(operations) == len(set(operations)) == 73
    methods = {name for name in dir(native.Driver) if not name.startswith("_")}
    assert methods - set(operations) == {"platform"}
    assert set(operations) <= methods
    assert list(faulty.calls) == sorted(operations)


def test_every_call_is_counted_also_one_that_fails(faulty: native.FaultyDriver) -> None:
    ptr = faulty.mem_alloc(0, 4096)
    faulty.fill_async(0, ptr, 0, 1, 4096)
    faulty.fill_async(0, ptr, 0, 1, 4096)
    with pytest.raises(DriverError):
        faulty.mem_free(0, ptr + 1)
    faulty.mem_free(0, ptr)
    counted = {name: count for name, count in faulty.calls.items() if count}
    assert counted == {"mem_alloc": 1, "fill_async": 2, "mem_free": 2}


# --- failing before ------------------------------------------------------------------------------


def test_only_the_nth_call_from_now_fails(faulty: native.FaultyDriver) -> None:
    faulty.mem_alloc(0, 4096)
    faulty.fail("mem_alloc", nth=3, status=Status.out_of_memory)
    faulty.mem_alloc(0, 4096)
    faulty.host_alloc(0, 4096)  # another operation does not count
    faulty.mem_alloc(0, 4096)
    assert faulty.pending == 1
    with pytest.raises(OutOfMemoryError) as caught:
        faulty.mem_alloc(0, 4096)
    assert caught.value.operation == "cuMemAlloc"
    assert faulty.pending == 0
    faulty.mem_alloc(0, 4096)
    assert faulty.live["device_memory"] == 4


def test_a_call_that_fails_before_does_nothing(faulty: native.FaultyDriver) -> None:
    ptr = faulty.mem_alloc(0, 4096)
    faulty.fail("mem_free")
    with pytest.raises(DriverError) as caught:
        faulty.mem_free(0, ptr)
    assert caught.value.code == Status.unknown.value
    assert alive(faulty) == {"device_memory": 1}
    faulty.mem_free(0, ptr)
    assert alive(faulty) == {}


def test_calls_of_every_operation_are_counted_for_a_star(faulty: native.FaultyDriver) -> None:
    faulty.fail("*", nth=3, status=Status.not_supported)
    faulty.device_count()
    faulty.memory_info(0)
    with pytest.raises(NotSupportedError) as caught:
        faulty.stream_create(0)
    assert caught.value.operation == "cuStreamCreateWithPriority"
    faulty.stream_create(0)


def test_several_calls_in_a_row_may_fail(faulty: native.FaultyDriver) -> None:
    faulty.fail("stream_create", nth=2, times=2)
    outcomes = []
    for _ in range(5):
        try:
            faulty.stream_create(0)
            outcomes.append(True)
        except DriverError:
            outcomes.append(False)
    assert outcomes == [True, False, False, True, True]


def test_clear_forgets_what_has_not_failed_yet(faulty: native.FaultyDriver) -> None:
    faulty.fail("mem_alloc")
    faulty.fail("*", nth=5, when="sticky")
    faulty.clear()
    assert faulty.pending == 0
    for _ in range(10):
        faulty.mem_alloc(0, 4096)
    assert faulty.calls["mem_alloc"] == 10


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"operation": "mem_aloc"}, "mem_aloc"),
        ({"operation": "mem_alloc", "nth": 0}, "nth is 0"),
        ({"operation": "mem_alloc", "times": 0}, "times is 0"),
        ({"operation": "mem_alloc", "when": "during"}, "during"),
        ({"operation": "mem_alloc", "status": Status.success}, "success"),
    ],
)
def test_a_wrong_rule_is_named(
    faulty: native.FaultyDriver, arguments: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidValueError, match=named):
        faulty.fail(**arguments)
    assert faulty.pending == 0


# --- failing afterwards --------------------------------------------------------------------------


def test_work_that_fails_afterwards_is_done(faulty: native.FaultyDriver) -> None:
    ptr = faulty.host_alloc(0, 64)
    faulty.fail("fill_async", when="after")
    with pytest.raises(DriverError):
        faulty.fill_async(0, ptr, 7, 1, 64)
    faulty.synchronize(0)
    assert ctypes.string_at(ptr, 64) == b"\x07" * 64


def test_a_release_that_fails_afterwards_has_released(faulty: native.FaultyDriver) -> None:
    ptr = faulty.mem_alloc(0, 4096)
    faulty.fail("mem_free", when="after")
    with pytest.raises(DriverError):
        faulty.mem_free(0, ptr)
    assert alive(faulty) == {}
    with pytest.raises(DriverError):
        faulty.mem_free(0, ptr)


def test_a_host_function_that_fails_afterwards_is_never_called(
    faulty: native.FaultyDriver,
) -> None:
    called: list[int] = []
    faulty.fail("launch_host_function", when="after")
    with pytest.raises(DriverError):
        faulty.launch_host_function(0, 0, lambda: called.append(1))
    faulty.synchronize(0)
    assert called == []


class Maker:
    """What every creating operation needs to succeed, and each of them as a call."""

    def __init__(self, faulty: native.FaultyDriver) -> None:
        self.faulty = faulty
        self.range = faulty.address_reserve(2 * MiB)
        self.physical = faulty.mem_create(2 * MiB, Props(shareable=True))
        self.mapped = faulty.address_reserve(2 * MiB)
        faulty.mem_map(self.mapped, 2 * MiB, self.physical)
        self.pool = faulty.pool_create(0, native.PoolProps(shareable=True))
        self.block = faulty.pool_alloc_async(0, self.pool, MiB)
        self.pool_fd = faulty.pool_export(0, self.pool)
        self.exported = faulty.pool_export_pointer(0, self.block)
        self.imported = faulty.pool_import(0, self.pool_fd)
        self.fd = faulty.mem_export(self.physical)
        self.pages = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.pool_fd)


CREATING: dict[str, tuple[str | None, Callable[[Maker], object]]] = {
    "mem_alloc": ("device_memory", lambda m: m.faulty.mem_alloc(0, 4096)),
    "host_alloc": ("pinned", lambda m: m.faulty.host_alloc(0, 4096)),
    "host_register": (
        "registered",
        lambda m: m.faulty.host_register(0, m.pages.ctypes.data, m.pages.nbytes),
    ),
    "managed_alloc": ("managed", lambda m: m.faulty.managed_alloc(0, 4096)),
    "mem_alloc_async": ("async_block", lambda m: m.faulty.mem_alloc_async(0, 4096)),
    "pool_alloc_async": ("async_block", lambda m: m.faulty.pool_alloc_async(0, m.pool, 4096)),
    "pool_import_pointer": (
        "async_block",
        lambda m: m.faulty.pool_import_pointer(0, m.imported, m.exported),
    ),
    "pool_create": ("pool", lambda m: m.faulty.pool_create(0, native.PoolProps())),
    "pool_import": ("pool", lambda m: m.faulty.pool_import(0, m.pool_fd)),
    "address_reserve": ("address_range", lambda m: m.faulty.address_reserve(2 * MiB)),
    "mem_create": ("physical", lambda m: m.faulty.mem_create(2 * MiB, Props())),
    "mem_import": ("physical", lambda m: m.faulty.mem_import(m.fd)),
    "mem_retain": ("physical", lambda m: m.faulty.mem_retain(m.mapped)),
    "mem_map": ("mapping", lambda m: m.faulty.mem_map(m.range, 2 * MiB, m.physical)),
    "stream_create": ("stream", lambda m: m.faulty.stream_create(0)),
    "event_create": ("event", lambda m: m.faulty.event_create(0)),
    "peer_enable": ("peer_link", lambda m: m.faulty.peer_enable(0, 1)),
    "mem_export": (None, lambda m: m.faulty.mem_export(m.physical)),
    "pool_export": (None, lambda m: m.faulty.pool_export(0, m.pool)),
}


@pytest.fixture
def maker(faulty: native.FaultyDriver) -> Iterator[Maker]:
    maker = Maker(faulty)
    yield maker
    maker.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("operation", CREATING)
def test_what_was_created_counts_as_live(maker: Maker, operation: str) -> None:
    kind, create = CREATING[operation]
    before = maker.faulty.live
    made = create(maker)
    after = maker.faulty.live
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed == ({kind: 1} if kind else {})
    if kind is None:
        assert isinstance(made, int)
        os.close(made)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("operation", CREATING)
def test_a_creation_that_fails_leaves_nothing_behind(
    maker: Maker, operation: str, when: str
) -> None:
    _, create = CREATING[operation]
    maker.faulty.fail(operation, when=when, times=2)
    with pytest.raises(DriverError):
        create(maker)  # the first of its kind: what the driver keeps for later is there now
    before = (maker.faulty.live, open_descriptors())
    free = maker.faulty.memory_info(0).free
    with pytest.raises(DriverError):
        create(maker)
    assert (maker.faulty.live, open_descriptors()) == before
    maker.faulty.synchronize(0)
    assert maker.faulty.memory_info(0).free >= free
    made = create(maker)  # and the next one succeeds: nothing is in its way
    if CREATING[operation][0] is None:
        assert isinstance(made, int)
        os.close(made)


def test_everything_released_is_nothing_alive(maker: Maker) -> None:
    faulty = maker.faulty
    made = {operation: create(maker) for operation, (_, create) in CREATING.items()}
    os.close(int(made["mem_export"]))
    os.close(int(made["pool_export"]))
    assert all(count > 0 for count in faulty.live.values())
    for ptr in (made["mem_alloc"], made["managed_alloc"]):
        faulty.mem_free(0, ptr)
    faulty.host_free(0, made["host_alloc"])
    faulty.host_unregister(0, maker.pages.ctypes.data)
    for ptr in (
        made["mem_alloc_async"],
        made["pool_alloc_async"],
        made["pool_import_pointer"],
        maker.block,
    ):
        faulty.mem_free_async(0, ptr)
    faulty.synchronize(0)
    for pool in (made["pool_create"], made["pool_import"], maker.imported, maker.pool):
        faulty.pool_destroy(0, pool)
    for ptr in (maker.range, maker.mapped):
        faulty.mem_unmap(ptr, 2 * MiB)
    for ptr in (maker.range, maker.mapped, made["address_reserve"]):
        faulty.address_free(ptr, 2 * MiB)
    for handle in (made["mem_create"], made["mem_import"], made["mem_retain"], maker.physical):
        faulty.mem_release(handle)
    faulty.stream_destroy(0, made["stream_create"])
    faulty.event_destroy(0, made["event_create"])
    faulty.peer_disable(0, 1)
    assert alive(faulty) == {}


def test_one_unmap_of_several_mappings_counts_them_all(faulty: native.FaultyDriver) -> None:
    base = faulty.address_reserve(8 * MiB)
    handle = faulty.mem_create(2 * MiB, Props())
    for index in range(4):
        faulty.mem_map(base + index * 2 * MiB, 2 * MiB, handle)
    assert faulty.live["mapping"] == 4
    with pytest.raises(DriverError):
        faulty.mem_unmap(base, 3 * MiB)  # a part of one: fails, and all four stay
    assert faulty.live["mapping"] == 4
    faulty.mem_unmap(base, 6 * MiB)
    assert faulty.live["mapping"] == 1


# --- sticky failures -----------------------------------------------------------------------------


def test_a_sticky_failure_stays_for_every_operation_of_its_device(
    faulty: native.FaultyDriver,
) -> None:
    ptr = faulty.mem_alloc(0, 4096)
    faulty.fail("fill_async", status=Status.illegal_address, when="sticky")
    for call in (
        lambda: faulty.fill_async(0, ptr, 0, 1, 4096),
        lambda: faulty.mem_alloc(0, 4096),
        lambda: faulty.mem_free(0, ptr),
        lambda: faulty.synchronize(0),
        lambda: faulty.mem_create(2 * MiB, Props()),
    ):
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.code == Status.illegal_address.value
    faulty.mem_free(1, faulty.mem_alloc(1, 4096))  # the other device is well
    faulty.address_free(faulty.address_reserve(2 * MiB), 2 * MiB)  # addresses are of no device
    faulty.clear()
    faulty.mem_free(0, ptr)
    assert alive(faulty) == {}


def test_a_sticky_failure_of_a_call_without_a_device_is_everywhere(
    faulty: native.FaultyDriver,
) -> None:
    faulty.fail("address_reserve", when="sticky")
    for call in (
        lambda: faulty.address_reserve(2 * MiB),
        lambda: faulty.mem_alloc(0, 4096),
        lambda: faulty.mem_alloc(1, 4096),
    ):
        with pytest.raises(DriverError):
            call()


# --- delays and threads --------------------------------------------------------------------------


def test_a_delayed_operation_starts_later_and_holds_nobody_up(
    faulty: native.FaultyDriver,
) -> None:
    faulty.delay("mem_create", 0.2)
    done: list[float] = []
    began = time.perf_counter()

    def create() -> None:
        faulty.mem_create(2 * MiB, Props())
        done.append(time.perf_counter() - began)

    thread = threading.Thread(target=create)
    thread.start()
    for _ in range(20):
        faulty.mem_alloc(0, 4096)
    assert time.perf_counter() - began < 0.2
    assert done == []
    thread.join()
    assert done[0] >= 0.2
    faulty.delay("mem_create", 0)
    began = time.perf_counter()
    faulty.mem_create(2 * MiB, Props())
    assert time.perf_counter() - began < 0.2


def test_a_delay_is_0_or_more_seconds(faulty: native.FaultyDriver) -> None:
    for seconds in (-1, float("nan")):
        with pytest.raises(InvalidValueError, match="seconds"):
            faulty.delay("mem_create", seconds)


def test_counters_add_up_over_threads(faulty: native.FaultyDriver) -> None:
    failures: list[int] = []
    faulty.fail("mem_alloc_async", nth=100, times=50)

    def churn() -> None:
        stream = faulty.stream_create(0)
        for _ in range(200):
            try:
                ptr = faulty.mem_alloc_async(0, 4096, stream)
            except DriverError:
                failures.append(1)
            else:
                faulty.mem_free_async(0, ptr, stream)
        faulty.stream_synchronize(0, stream)
        faulty.stream_destroy(0, stream)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 50
    assert faulty.calls["mem_alloc_async"] == 800
    assert faulty.calls["mem_free_async"] == 750
    assert alive(faulty) == {}


def test_a_faulty_driver_around_a_faulty_driver_counts_for_itself(
    faulty: native.FaultyDriver,
) -> None:
    outer = native.FaultyDriver(faulty)
    outer.fail("mem_alloc")
    with pytest.raises(DriverError):
        outer.mem_alloc(0, 4096)
    outer.mem_alloc(0, 4096)
    assert (outer.calls["mem_alloc"], faulty.calls["mem_alloc"]) == (2, 1)
    assert outer.driver is faulty
