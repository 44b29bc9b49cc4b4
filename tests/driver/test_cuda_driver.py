"""How CudaDriver calls a driver library: contexts, arguments and results, on a machine without
CUDA, against a small library of our own (fake_cuda.c)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest

from ringmem.native import _native as native
from ringmem.native.errors import (
    DriverError,
    InvalidDeviceError,
    NotSupportedError,
    OutOfMemoryError,
)

if TYPE_CHECKING:
    from tests.driver.conftest import Fake

pytestmark = pytest.mark.timeout(60, method="thread")


# --- contexts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [0, 100, 101, 555])
def test_an_operation_runs_in_its_devices_context_and_leaves_the_callers(
    fake: Fake, context: int
) -> None:
    driver = fake.driver()
    if context:
        fake.push(context)
    for device in (0, 1):
        assert driver.mem_alloc(device, 64) == 0x10000 * (device + 1) + 64
        assert fake.current() == context
        driver.mem_free(device, 0x1000)
        assert fake.last(2) == [0x1000, device]
        assert fake.current() == context


def test_nothing_is_pushed_where_the_context_is_current_already(fake: Fake) -> None:
    driver = fake.driver()
    fake.push(101)
    fake.int("fake_pushes").value = 0
    driver.mem_alloc(1, 64)
    assert fake.int("fake_pushes").value == 0


@pytest.mark.parametrize("context", [0, 555])
def test_allocating_in_a_default_streams_order_runs_in_the_devices_context(
    fake: Fake, context: int
) -> None:
    driver = fake.driver()
    if context:
        fake.push(context)
    for stream in (0, 1, 2):
        assert driver.pool_alloc_async(1, 0x77, 64, stream) == 0x4000
        assert fake.last(4) == [64, 0x77, stream, 1]
        assert driver.mem_alloc_async(1, 64, stream) == 0x4000
        assert fake.last(4) == [64, 0, stream, 1]
        driver.mem_free_async(1, 0x4000, stream)
        assert fake.last(3) == [0x4000, stream, 1]
        assert fake.current() == context


@pytest.mark.parametrize("context", [0, 555])
def test_allocating_in_another_streams_order_needs_no_context(fake: Fake, context: int) -> None:
    driver = fake.driver()
    if context:
        fake.push(context)
    fake.int("fake_pushes").value = 0
    assert driver.pool_alloc_async(1, 0x77, 64, 2007) == 0x4000
    assert fake.last(3) == [64, 0x77, 2007]
    assert driver.mem_alloc_async(1, 64, 2007) == 0x4000
    driver.mem_free_async(1, 0x4000, 2007)
    assert fake.last(2) == [0x4000, 2007]
    assert fake.int("fake_pushes").value == 0
    assert fake.current() == context
    with pytest.raises(InvalidDeviceError):
        driver.mem_free_async(9, 0x4000, 2007)


def test_the_callers_context_is_back_after_a_failure(fake: Fake) -> None:
    driver = fake.driver()
    fake.push(555)
    fake.fail("cuMemAlloc", native.Status.out_of_memory)
    with pytest.raises(OutOfMemoryError):
        driver.mem_alloc(0, 64)
    assert fake.current() == 555


def test_a_primary_context_is_retained_once_and_only_when_needed(fake: Fake) -> None:
    driver = fake.driver()
    driver.device_count()
    driver.attribute(0, native.Attribute.l2_cache_size)
    driver.mem_create(4096, native.PhysicalProps())
    assert list(fake.retained)[:2] == [0, 0]
    for _ in range(3):
        driver.mem_alloc(1, 64)
    assert driver.primary_context(1) == 101
    assert list(fake.retained)[:2] == [0, 1]


def test_a_context_that_cannot_be_retained_is_the_operations_error_and_tried_again(
    fake: Fake,
) -> None:
    driver = fake.driver()
    fake.fail("cuDevicePrimaryCtxRetain", native.Status.out_of_memory)
    with pytest.raises(OutOfMemoryError) as caught:
        driver.mem_alloc(0, 64)
    assert caught.value.operation == "cuMemAlloc"
    fake.fail("", native.Status.success)
    assert driver.mem_alloc(0, 64) == 0x10000 + 64


# --- arguments and results -----------------------------------------------------------------------


@pytest.mark.parametrize("device", [-1, 2, 1000])
def test_a_device_that_is_not_there_is_an_invalid_device(fake: Fake, device: int) -> None:
    driver = fake.driver()
    for call in (
        lambda: driver.mem_alloc(device, 64),
        lambda: driver.device_info(device),
        lambda: driver.mem_create(64, native.PhysicalProps(native.Location(id=device))),
        lambda: driver.mem_set_access(4096, 64, [(native.Location(id=device), native.Access.read)]),
        lambda: driver.peer_can_access(0, device),
    ):
        with pytest.raises(InvalidDeviceError):
            call()


def test_an_error_names_the_call_its_arguments_code_and_name(fake: Fake) -> None:
    driver = fake.driver()
    fake.fail("cuMemFree", native.Status.illegal_address)
    with pytest.raises(DriverError, match=r"cuMemFree failed.*device=1, ptr=0xabc000") as caught:
        driver.mem_free(1, 0xABC000)
    assert type(caught.value) is DriverError
    assert caught.value.code == 700
    assert caught.value.name == "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_an_error_that_has_no_name_here_keeps_its_number(fake: Fake) -> None:
    driver = fake.driver()
    fake.monkeypatch.setenv("FAKE_CUDA_FAIL", "cuCtxSynchronize")
    fake.monkeypatch.setenv("FAKE_CUDA_STATUS", "222")
    with pytest.raises(DriverError) as caught:
        driver.synchronize(0)
    assert (caught.value.code, caught.value.name) == (222, "CUDA_ERROR_222")


def test_device_info_has_name_and_uuid(fake: Fake) -> None:
    info = fake.driver().device_info(1)
    assert info.name == "Fake 1"
    assert info.uuid == "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"


def test_pending_work_is_false_and_not_an_error(fake: Fake) -> None:
    driver = fake.driver()
    assert driver.stream_query(0, 1007) is False
    assert driver.stream_query(0, 1008) is True


def test_stream_create_passes_flags_and_priority(fake: Fake) -> None:
    driver = fake.driver()
    assert driver.stream_create(1, non_blocking=True, priority=-5) == 2007
    assert fake.last(2) == [1, 2**64 - 5]
    driver.stream_create(1, non_blocking=False)
    assert fake.last(2) == [0, 0]


@pytest.mark.parametrize("missing", ["", ",cuStreamGetDevice,"])
def test_the_device_of_a_stream_also_without_cuStreamGetDevice(fake: Fake, missing: str) -> None:
    driver = fake.driver(missing=missing)
    fake.push(555)
    assert [driver.stream_device(1007), driver.stream_device(2007)] == [0, 1]
    assert fake.current() == 555


HOST = native.Location(native.LocationKind.host)
NODE = native.Location(native.LocationKind.host_numa, 3)


def test_prefetch_has_the_newer_signature_where_the_driver_has_it(fake: Fake) -> None:
    driver = fake.driver()
    for location, seen in ((native.Location(id=1), [1, 1]), (HOST, [2, 0]), (NODE, [3, 3])):
        driver.prefetch(0, 0x7000, 64, location, 1008)
        assert fake.last(7) == [2, 0x7000, 64, *seen, 0, 1008]


def test_prefetch_has_the_older_signature_on_an_older_driver(fake: Fake) -> None:
    driver = fake.driver(version=12010)
    driver.prefetch(0, 0x7000, 64, native.Location(id=1), 1008)
    assert fake.last(5) == [1, 0x7000, 64, 1, 1008]
    driver.prefetch(0, 0x7000, 64, HOST, 1008)
    assert fake.last(5) == [1, 0x7000, 64, 2**64 - 1, 1008]  # CU_DEVICE_CPU
    with pytest.raises(NotSupportedError):
        driver.prefetch(0, 0x7000, 64, NODE, 1008)


def test_discard_is_a_batch_of_one(fake: Fake) -> None:
    fake.driver().discard(0, 0x7000, 4096, 1008)
    assert fake.last(5) == [0x7000, 4096, 1, 0, 1008]


@pytest.mark.parametrize("stream", [0, 1])
def test_discard_on_the_legacy_stream_takes_its_turn_on_another(fake: Fake, stream: int) -> None:
    fake.driver().discard(0, 7000, 4096, stream)
    assert fake.trace.value.decode() == (
        f"record 5 on {stream}; wait 5 on 1007; discard 7000 on 1007; "
        f"record 5 on 1007; wait 5 on {stream}; destroy event 5; destroy stream 1007; "
    )


@pytest.mark.parametrize("function", ["cuEventCreate", "cuMemDiscardBatchAsync"])
def test_a_discard_that_fails_on_the_legacy_stream_leaves_nothing(
    fake: Fake, function: str
) -> None:
    driver = fake.driver()
    fake.fail(function, native.Status.not_permitted)
    with pytest.raises(DriverError) as caught:
        driver.discard(0, 7000, 4096)
    assert caught.value.code == native.Status.not_permitted.value
    assert fake.trace.value.decode().endswith("destroy stream 1007; ")
    assert ("destroy event 5" in fake.trace.value.decode()) is (function != "cuEventCreate")


def test_physical_memory_has_its_location_and_flags_and_needs_no_context(fake: Fake) -> None:
    driver = fake.driver()
    no_context = 2**64 - 1
    assert driver.mem_create(4096, native.PhysicalProps(native.Location(id=1))) == 4096
    assert fake.last(7) == [1, 0, 1, 1, 0, 0, no_context]
    driver.mem_create(4096, native.PhysicalProps(NODE, shareable=True, rdma=True))
    assert fake.last(7) == [1, 1, 3, 3, 1, 0, no_context]
    assert list(fake.retained)[:2] == [0, 0]


def test_access_grants_arrive_in_their_order(fake: Fake) -> None:
    grants = [(native.Location(id=1), native.Access.readwrite), (HOST, native.Access.read)]
    fake.driver().mem_set_access(4096, 4096, grants)
    assert fake.last(7) == [2, 1, 1, 3, 2, 0, 1]
    with pytest.raises(DriverError):
        fake.driver().mem_set_access(4096, 4096, [])


def test_descriptors_go_out_and_in_by_value(fake: Fake) -> None:
    driver = fake.driver()
    assert driver.mem_export(7) == 7
    assert driver.mem_import(7) == 1007
    with pytest.raises(DriverError):
        driver.mem_import(-1)


def test_a_pools_flags_are_ints_and_its_sizes_64_bits(fake: Fake) -> None:
    driver = fake.driver()
    get = native.PoolAttribute
    assert driver.pool_get(0, 1, get.reserved_current) == 0x123456789ABC
    # The fake answers -1 as an int; only its own 32 bits may have been written and read.
    assert driver.pool_get(0, 1, get.reuse_allow_opportunistic) & 0xFFFFFFFF == 0xFFFFFFFF


def test_pointer_info_of_every_kind_comes_from_one_call(fake: Fake) -> None:
    driver = fake.driver()
    kinds = native.PointerKind
    unknown = driver.pointer_info(0, 0x5010)
    assert (unknown.kind, unknown.device, unknown.base) == (kinds.unregistered, -1, 0)
    pinned = driver.pointer_info(0, 0x6010)
    assert (pinned.kind, pinned.device, pinned.host_ptr) == (kinds.pinned, 1, 0x6010)
    assert (pinned.base, pinned.nbytes) == (0x6000, 4096)
    managed = driver.pointer_info(0, 0x7010)
    assert (managed.kind, managed.base, managed.nbytes) == (kinds.managed, 0, 0)
    device = driver.pointer_info(0, 0x8010)
    assert (device.kind, device.device_ptr, device.host_ptr) == (kinds.device, 0x8010, 0)


GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # CUstreamCaptureMode


def exchange_mode(fake: Fake, new: int) -> int:
    value = ctypes.c_int(new)
    fake.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    return value.value


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_every_call_is_made_in_the_relaxed_capture_mode(fake: Fake, mode: int) -> None:
    driver = fake.driver()
    calls = (
        lambda: driver.mem_free(0, 4096),  # in a context
        lambda: driver.mem_create(4096, native.PhysicalProps(native.Location(id=1))),  # in none
        lambda: driver.mem_free_async(0, 4096, 0x1234),  # in a stream's order
    )
    for call in calls:
        exchange_mode(fake, mode)
        fake.int("fake_mode").value = -1
        call()
        assert fake.int("fake_mode").value == RELAXED
        assert exchange_mode(fake, GLOBAL) == mode


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_the_relaxed_capture_mode_gives_back_the_applications_mode(fake: Fake, mode: int) -> None:
    driver = fake.driver()

    def exchange(new: int) -> int:
        return exchange_mode(fake, new)

    exchange(mode)
    driver.relax_capture(False)  # nothing was relaxed: nothing to undo
    outer = driver.relax_capture(True)
    assert outer is (mode == RELAXED)
    inner = driver.relax_capture(True)
    assert inner is True
    driver.relax_capture(inner)
    assert exchange(RELAXED) == RELAXED
    driver.relax_capture(outer)
    assert exchange(GLOBAL) == mode
