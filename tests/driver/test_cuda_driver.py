"""How CudaDriver loads a driver library and calls it, on a machine without CUDA: against a small
library of our own (fake_cuda.c) that answers for it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringmem.native import _native as native
from ringmem.native.errors import (
    DriverError,
    InvalidDeviceError,
    NotInitializedError,
    NotSupportedError,
    OutOfMemoryError,
)

FAKE_SOURCE = Path(__file__).with_name("fake_cuda.c")
FAKE_VARIABLES = ("VERSION", "DEVICES", "INIT", "MISSING", "FAIL", "STATUS")

Compile = Callable[..., Path]


@pytest.fixture(scope="session")
def compile_fake(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake driver with")
    folder = tmp_path_factory.mktemp("fake_cuda")

    def build(*flags: str) -> Path:
        library = folder / f"lib{'_'.join(flags).replace('-D', '') or 'cuda'}.so"
        if not library.exists():
            command = [compiler, "-shared", "-fPIC", *flags, "-o", str(library), str(FAKE_SOURCE)]
            subprocess.run(command, check=True)
        return library

    return build


class Fake:
    """The fake library as the process sees it, and a driver on it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RINGMEM_CUDA_LIBRARY", str(path))
        for name in FAKE_VARIABLES:
            monkeypatch.delenv(f"FAKE_CUDA_{name}", raising=False)
        self.path = path
        self.monkeypatch = monkeypatch
        self.library = ctypes.CDLL(str(path))
        self.retained = (ctypes.c_int * 8).in_dll(self.library, "fake_retained")
        self.released = (ctypes.c_int * 8).in_dll(self.library, "fake_released")
        self.last_arguments = (ctypes.c_uint64 * 8).in_dll(self.library, "fake_last")
        for counters in (self.retained, self.released, self.last_arguments):
            ctypes.memset(counters, 0, ctypes.sizeof(counters))
        for name in ("fake_pushes", "fake_pops", "fake_asked_too_new"):
            self.int(name).value = 0

    def int(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self.library, name)

    def last(self, count: int) -> list[int]:
        return list(self.last_arguments)[:count]

    def driver(self, **settings: object) -> native.CudaDriver:
        for name, value in settings.items():
            self.monkeypatch.setenv(f"FAKE_CUDA_{name.upper()}", str(value))
        return native.CudaDriver()

    def fail(self, function: str, status: native.Status) -> None:
        self.monkeypatch.setenv("FAKE_CUDA_FAIL", function)
        self.monkeypatch.setenv("FAKE_CUDA_STATUS", str(status.value))

    def current(self) -> int:
        context = ctypes.c_size_t(99)
        self.library.cuCtxGetCurrent(ctypes.byref(context))
        return context.value

    def push(self, context: int) -> None:
        self.library.cuCtxPushCurrent(ctypes.c_size_t(context))

    def pop(self) -> None:
        self.library.cuCtxPopCurrent(ctypes.byref(ctypes.c_size_t()))


@pytest.fixture
def fake(compile_fake: Compile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    fake = Fake(compile_fake(), monkeypatch)
    yield fake
    while fake.current():
        fake.pop()


# --- loading -------------------------------------------------------------------------------------


def test_a_library_that_does_not_exist_is_not_initialized_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RINGMEM_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    driver = native.CudaDriver()
    assert driver.library == "/nowhere/libcuda.so.1"
    assert "/nowhere/libcuda.so.1" in driver.load_error
    with pytest.raises(NotInitializedError, match=r"/nowhere/libcuda\.so\.1") as caught:
        driver.device_count()
    assert caught.value.operation == "cuDeviceGetCount"
    assert caught.value.name == "CUDA_ERROR_NOT_INITIALIZED"


def test_a_library_that_is_no_driver_is_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGMEM_CUDA_LIBRARY", "libm.so.6")
    assert "libm.so.6 is no CUDA driver library" in native.CudaDriver().load_error


def test_every_operation_is_not_initialized_without_a_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RINGMEM_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    driver = native.CudaDriver()
    location = native.Location()
    arguments: dict[str, tuple[object, ...]] = {
        "device_count": (),
        "driver_version": (),
        "attribute": (0, native.Attribute.l2_cache_size),
        "managed_alloc": (0, 1),
        "stream_attach": (0, 0, 1, 1, native.ManagedAttach.single),
        "prefetch": (0, 1, 1, location),
        "advise": (0, 1, 1, native.Advice.set_read_mostly, location),
        "pool_create": (0, native.PoolProps()),
        "pool_get": (0, 1, native.PoolAttribute.used_current),
        "pool_set": (0, 1, native.PoolAttribute.used_high, 0),
        "pool_set_access": (0, 1, [(location, native.Access.read)]),
        "pool_get_access": (0, 1, location),
        "pool_import_pointer": (0, 1, bytes(64)),
        "granularity": (native.PhysicalProps(),),
        "address_reserve": (4096,),
        "mem_create": (4096, native.PhysicalProps()),
        "mem_release": (1,),
        "mem_map": (1, 1, 1),
        "mem_set_access": (1, 1, [(location, native.Access.read)]),
        "mem_get_access": (1, location),
        "mem_export": (1,),
        "mem_import": (1,),
        "mem_retain": (1,),
        "copy_2d_async": (0, 1, 1, 1, 1, 1, 1),
        "copy_peer_async": (0, 1, 0, 1, 1),
        "fill_async": (0, 1, 0, 1, 1),
        "stream_create": (0,),
        "stream_device": (5,),
        "launch_host_function": (0, 0, print),
        "event_create": (0,),
        "relax_capture": (True,),
    }
    for operation in native.FaultyDriver.operations:
        method = getattr(driver, operation)
        filler = arguments.get(operation)
        for count in (1, 2, 3, 4, 5) if filler is None else (0,):
            try:
                with pytest.raises(NotInitializedError):
                    method(*(filler if filler is not None else (0,) + (1,) * (count - 1)))
                break
            except TypeError:
                continue  # another number of arguments
        else:
            pytest.fail(f"no arguments found for {operation}")


@pytest.mark.parametrize("flags", [(), ("-DOLD_PROC_ADDRESS",), ("-DNO_PROC_ADDRESS",)])
def test_a_driver_before_12_0_is_refused_and_told_what_is_needed(
    flags: tuple[str, ...], compile_fake: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Fake(compile_fake(*flags), monkeypatch).driver(version=11020)
    assert "supports CUDA 11.2" in driver.load_error
    assert "needs one for CUDA 12.0 or newer (NVIDIA driver 525 or newer)" in driver.load_error
    with pytest.raises(NotInitializedError, match=r"supports CUDA 11\.2"):
        driver.driver_version()


def test_the_older_form_of_cuGetProcAddress_will_do(
    compile_fake: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Fake(compile_fake("-DOLD_PROC_ADDRESS"), monkeypatch).driver(version=12000)
    assert driver.load_error == ""
    assert driver.device_count() == 2
    with pytest.raises(NotSupportedError):
        driver.discard(0, 0x1000, 64)  # since 13.0


def test_a_failing_cuInit_is_not_initialized_with_its_error(fake: Fake) -> None:
    driver = fake.driver(init=100)
    assert "cuInit failed: CUDA_ERROR_NO_DEVICE (100)" in driver.load_error
    with pytest.raises(NotInitializedError):
        driver.device_count()


def test_no_device_is_not_initialized(fake: Fake) -> None:
    assert fake.driver(devices=0).load_error == "there is no CUDA device"


def test_a_library_without_the_functions_every_driver_has_is_refused(fake: Fake) -> None:
    driver = fake.driver(missing=",cuCtxPushCurrent,")
    assert "lacks functions that every CUDA driver has" in driver.load_error


def test_a_missing_function_is_not_supported_and_the_rest_works(fake: Fake) -> None:
    driver = fake.driver(missing=",cuMemCreate,cuMemAlloc,")
    with pytest.raises(NotSupportedError) as caught:
        driver.mem_create(4096, native.PhysicalProps())
    assert caught.value.operation == "cuMemCreate"
    with pytest.raises(NotSupportedError):
        driver.mem_alloc(0, 64)
    assert driver.stream_create(0) == 1007


def test_every_function_is_asked_for_in_a_version_that_the_driver_knows(fake: Fake) -> None:
    assert fake.driver(version=13000).device_count() == 2
    assert fake.int("fake_asked_too_new").value == 0
    assert fake.int("fake_asked_flags").value == 1  # CU_GET_PROC_ADDRESS_LEGACY_STREAM


def test_nothing_is_loaded_before_the_first_operation(compile_fake: Compile) -> None:
    code = """
import os
def loaded():
    return os.environ["RINGMEM_CUDA_LIBRARY"] in open("/proc/self/maps").read()
from ringmem.native import _native as native
driver = native.cuda_driver()
assert driver.platform == "cuda" and not loaded(), "loaded too early"
assert driver.device_count() == 2 and loaded()
assert native.cuda_driver().driver_version() == 13000
"""
    environment = {**os.environ, "RINGMEM_CUDA_LIBRARY": str(compile_fake())}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_the_child_of_a_fork_is_not_initialized(fake: Fake) -> None:
    driver = fake.driver()
    assert driver.device_count() == 2
    child = os.fork()
    if child == 0:
        code = 1
        try:
            driver.device_count()
        except NotInitializedError as error:
            code = 0 if "forked" in str(error) and "forked" in driver.load_error else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert driver.device_count() == 2


def test_a_child_that_forked_before_loading_loads_for_itself(compile_fake: Compile) -> None:
    code = """
import os
from ringmem.native import _native as native
driver = native.cuda_driver()
child = os.fork()
count = driver.device_count()
if child == 0:
    os._exit(count)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2 == count
"""
    environment = {**os.environ, "RINGMEM_CUDA_LIBRARY": str(compile_fake())}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


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


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_the_relaxed_capture_mode_gives_back_the_applications_mode(fake: Fake, mode: int) -> None:
    driver = fake.driver()

    def exchange(new: int) -> int:
        value = ctypes.c_int(new)
        fake.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
        return value.value

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
