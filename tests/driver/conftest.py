"""One suite for every driver: each conformance test runs on the host driver, on one that is late
and hides its memory, and on CUDA where there is a device. Where drivers differ, the difference is
a capability that the test asks for by name (`Kit.require`), never a silent skip."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pytest

from ringmem.native import _native as native
from ringmem.native.errors import DriverError

Bytes = npt.NDArray[np.uint8]

HOST_DRIVERS = {
    "host": "devices=2,capacity=1GiB",
    "host-late": "devices=2,capacity=1GiB,latency_s=0.002,strict=1",
}


@dataclass
class Pinned:
    """Page-locked host memory, for both sides."""

    ptr: int
    device_ptr: int
    data: Bytes


@dataclass
class Gate:
    """A stream waits for `flag`: what is submitted behind it stays pending until `open`."""

    flag: npt.NDArray[np.uint32]

    def open(self) -> None:
        self.flag[0] = 1


@dataclass
class Kit:
    """A driver, and what a test makes with it: all given back at its end, last made first."""

    driver: native.Driver
    is_host: bool
    device: int = 0
    cleanup: ExitStack = field(default_factory=ExitStack)
    gates: list[Gate] = field(default_factory=list)

    # --- helpers ---------------------------------------------------------------------------------

    @staticmethod
    def view(ptr: int, nbytes: int) -> Bytes:
        """The host memory at `ptr` as bytes; the caller keeps it alive."""
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(ptr), dtype=np.uint8)

    @staticmethod
    def pattern(nbytes: int, seed: int = 1) -> Bytes:
        return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)

    @staticmethod
    def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    @staticmethod
    @contextmanager
    def refused(*statuses: native.Status) -> Iterator[None]:
        """The call inside fails with one of these statuses; with any, where none is named."""
        with pytest.raises(DriverError) as caught:
            yield
        if statuses:
            assert caught.value.code in [status.value for status in statuses], caught.value

    # --- capabilities ----------------------------------------------------------------------------

    def attribute(self, attribute: native.Attribute, device: int = 0) -> int:
        return self.driver.attribute(device, attribute)

    def require(self, attribute: native.Attribute) -> None:
        if not self.attribute(attribute):
            pytest.skip(f"the device lacks the capability {attribute.name}")

    def require_host_driver(self, reason: str) -> None:
        if not self.is_host:
            pytest.skip(f"undefined on a real device: {reason}")

    def require_peers(self) -> None:
        if self.driver.device_count() < 2 or not self.driver.peer_can_access(0, 1):
            pytest.skip("needs two devices that can access each other")

    # --- making ----------------------------------------------------------------------------------

    def stream(self, device: int = 0, **flags: object) -> int:
        stream = self.driver.stream_create(device, **flags)
        self.cleanup.callback(self.driver.stream_destroy, device, stream)
        return stream

    def event(self, device: int = 0, **flags: object) -> int:
        event = self.driver.event_create(device, **flags)
        self.cleanup.callback(self.driver.event_destroy, device, event)
        return event

    def alloc(self, nbytes: int, device: int = 0) -> int:
        ptr = self.driver.mem_alloc(device, nbytes)
        self.cleanup.callback(self.driver.mem_free, device, ptr)
        return ptr

    def pinned(self, nbytes: int, device: int = 0) -> Pinned:
        ptr = self.driver.host_alloc(device, nbytes)
        self.cleanup.callback(self.driver.host_free, device, ptr)
        data = self.view(ptr, nbytes)
        data[:] = 0
        return Pinned(ptr, self.driver.host_device_pointer(device, ptr), data)

    def managed(self, nbytes: int) -> int:
        self.require(native.Attribute.managed_memory)
        ptr = self.driver.managed_alloc(self.device, nbytes)
        self.cleanup.callback(self.driver.mem_free, self.device, ptr)
        return ptr

    def pool(self, **props: object) -> int:
        self.require(native.Attribute.memory_pools)
        pool = self.driver.pool_create(self.device, native.PoolProps(**props))
        self.cleanup.callback(self.driver.pool_destroy, self.device, pool)
        return pool

    # --- virtual memory --------------------------------------------------------------------------

    def granularity(self, **props: object) -> int:
        self.require(native.Attribute.virtual_memory_management)
        return self.driver.granularity(native.PhysicalProps(**props))

    def physical(self, nbytes: int, **props: object) -> int:
        handle = self.driver.mem_create(nbytes, native.PhysicalProps(**props))
        self.cleanup.callback(self.driver.mem_release, handle)
        return handle

    def reserve(self, nbytes: int, alignment: int = 0) -> int:
        self.require(native.Attribute.virtual_memory_management)
        ptr = self.driver.address_reserve(nbytes, alignment)
        self.cleanup.callback(self.driver.address_free, ptr, nbytes)
        return ptr

    def map(self, ptr: int, nbytes: int, handle: int, access: bool = True) -> None:
        self.driver.mem_map(ptr, nbytes, handle)
        self.cleanup.callback(self.driver.mem_unmap, ptr, nbytes)
        if access:
            self.grant(ptr, nbytes)

    def grant(
        self, ptr: int, nbytes: int, access: native.Access | None = None, device: int = 0
    ) -> None:
        access = native.Access.readwrite if access is None else access
        self.driver.mem_set_access(ptr, nbytes, [(native.Location(id=device), access)])

    # --- data ------------------------------------------------------------------------------------

    def upload(self, ptr: int, data: Bytes, stream: int = 0, device: int = 0) -> None:
        staging = self.pinned(data.nbytes)
        staging.data[:] = data
        self.driver.copy_async(device, ptr, staging.ptr, data.nbytes, stream)
        self.driver.stream_synchronize(device, stream)

    def download(self, ptr: int, nbytes: int, stream: int = 0, device: int = 0) -> Bytes:
        staging = self.pinned(nbytes)
        self.driver.copy_async(device, staging.ptr, ptr, nbytes, stream)
        self.driver.stream_synchronize(device, stream)
        return staging.data.copy()

    def fill(self, ptr: int, value: int, nbytes: int, stream: int = 0, device: int = 0) -> None:
        self.driver.fill_async(device, ptr, value, 1, nbytes, stream)

    # --- time ------------------------------------------------------------------------------------

    def gate(self, stream: int, device: int = 0) -> Gate:
        self.require(native.Attribute.stream_mem_ops_64)
        memory = self.pinned(64, device)
        gate = Gate(memory.data.view(np.uint32))
        self.gates.append(gate)
        self.driver.stream_wait_value(device, stream, memory.device_ptr, 1)
        return gate

    def finish(self) -> None:
        for gate in self.gates:
            gate.open()
        # A sticky error, where a test made one, is that test's business.
        for device in range(self.driver.device_count()):
            try:
                self.driver.synchronize(device)
            except DriverError:
                self.cleanup.pop_all()
                return
        self.cleanup.close()


def cuda_or_skip() -> native.Driver:
    driver = native.cuda_driver()
    if driver.load_error:
        pytest.skip(f"no CUDA device: {driver.load_error}")
    return driver


@pytest.fixture(params=[*HOST_DRIVERS, pytest.param("cuda", marks=pytest.mark.cuda)])
def driver_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def driver(driver_name: str) -> native.Driver:
    if driver_name == "cuda":
        return cuda_or_skip()
    return native.HostDriver(HOST_DRIVERS[driver_name])


@pytest.fixture
def kit(driver: native.Driver) -> Iterator[Kit]:
    kit = Kit(driver, is_host=driver.platform == "cpu")
    yield kit
    kit.finish()


@pytest.fixture
def host() -> Iterator[Kit]:
    """A host driver only, for what a real device leaves undefined."""
    kit = Kit(native.HostDriver(HOST_DRIVERS["host"]), is_host=True)
    yield kit
    kit.finish()


class RunPeer(Protocol):
    """Runs peer_process.py in another process, with these descriptors inherited."""

    def __call__(
        self, what: str, fds: list[int], nbytes: int, expected: int, written: int, *more: str
    ) -> None: ...


@pytest.fixture
def run_peer(kit: Kit) -> RunPeer:
    def run(
        what: str, fds: list[int], nbytes: int, expected: int, written: int, *more: str
    ) -> None:
        script = Path(__file__).with_name("peer_process.py")
        kind = "host" if kit.is_host else "cuda"
        arguments = [kind, what, str(nbytes), str(expected), str(written), *more, *map(str, fds)]
        subprocess.run(
            [sys.executable, str(script), *arguments], pass_fds=fds, check=True, timeout=60
        )

    return run


# --- a driver library of our own, for a machine without CUDA -------------------------------------

FAKE_SOURCE = Path(__file__).with_name("fake_cuda.c")
FAKE_VARIABLES = ("VERSION", "DEVICES", "INIT", "MISSING", "FAIL", "STATUS")

Compile = Callable[..., Path]
MakeFake = Callable[..., "Fake"]


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
        self.trace = (ctypes.c_char * 256).in_dll(self.library, "fake_trace")
        for counters in (self.retained, self.released, self.last_arguments, self.trace):
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
def make_fake(compile_fake: Compile, monkeypatch: pytest.MonkeyPatch) -> MakeFake:
    """A library compiled with these flags."""
    return lambda *flags: Fake(compile_fake(*flags), monkeypatch)


@pytest.fixture
def fake(make_fake: MakeFake) -> Iterator[Fake]:
    fake = make_fake()
    yield fake
    while fake.current():
        fake.pop()
