"""How CudaDriver finds and loads a driver library, on a machine without CUDA: against a small
library of our own (fake_cuda.c) that answers for it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ringmem.native import _native as native
from ringmem.native.errors import NotInitializedError, NotSupportedError

if TYPE_CHECKING:
    from tests.driver.conftest import Compile, Fake, MakeFake


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
    flags: tuple[str, ...], make_fake: MakeFake
) -> None:
    driver = make_fake(*flags).driver(version=11020)
    assert "supports CUDA 11.2" in driver.load_error
    assert "needs one for CUDA 12.0 or newer (NVIDIA driver 525 or newer)" in driver.load_error
    with pytest.raises(NotInitializedError, match=r"supports CUDA 11\.2"):
        driver.driver_version()


def test_the_older_form_of_cuGetProcAddress_will_do(
    make_fake: MakeFake,
) -> None:
    driver = make_fake("-DOLD_PROC_ADDRESS").driver(version=12000)
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
            once = str(error).count("this process was forked") == 1
            code = 0 if once and "'spawn'" in str(error) and "forked" in driver.load_error else 2
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
