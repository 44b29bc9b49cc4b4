"""Loading and launching a ring kernel with cuda.core, in the device's primary context.

Kernels are loaded before anything spins, and never unloaded: loading lazily and unloading may wait
for a persistent kernel. They are few and small, and the next kernel of the same content reuses
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ringmem.native import _native
from ringmem.native.errors import DriverError, InvalidValueError, NotSupportedError
from ringmem.native.locks import Lock
from ringmem.ring.cuda_build import KERNEL, LoopSettings

if TYPE_CHECKING:
    from ringmem.device import Device, Stream

__all__ = ["LoadedKernel", "Residency", "current_context", "load_kernel", "shared_limit_nbytes"]

_loaded: dict[tuple[int, bytes], LoadedKernel] = {}
_lock = Lock()  # guards _loaded; never held around a driver call


@contextlib.contextmanager
def current_context(device: Device, operation: str) -> Iterator[None]:
    """Work in the device's primary context, and leave the thread's context as it was.

    Captures elsewhere in the process are not disturbed. Errors of cuda.core and cuda.bindings come
    out as :class:`DriverError`.
    """
    from cuda.bindings import driver

    context = driver.CUcontext(device.driver.primary_context(device.ordinal))
    relaxed = device.driver.relax_capture(True)
    try:
        check(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent()
    except (DriverError, InvalidValueError):
        raise
    except Exception as error:
        if type(error).__name__ in ("CUDAError", "NVRTCError"):
            raise DriverError(f"{operation} failed: {error}", operation=operation) from error
        raise
    finally:
        device.driver.relax_capture(relaxed)


def check(result: tuple[Any, ...], operation: str) -> Any:
    """Return what a call of cuda.bindings returned beside its status; raise for a bad status."""
    status, *values = result
    if int(status):
        raise DriverError(
            f"{operation} failed: {status.name}",
            operation=operation,
            code=int(status),
            name=status.name,
        )
    return values[0] if values else None


def shared_limit_nbytes(device: Device) -> int:
    """Return the dynamic shared memory that a block of the device may have."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    device.driver.memory_info(device.ordinal)  # the driver is initialized
    return int(
        check(driver.cuDeviceGetAttribute(attribute, device.ordinal), "cuDeviceGetAttribute")
    )


class LoadedKernel:
    """A ring kernel in a device's memory, ready to launch."""

    def __init__(self, device: Device, cubin: bytes, settings: LoopSettings) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self.device = device
        self.settings = settings
        with current_context(device, "loading the ring kernel"):
            self._code = ObjectCode.from_cubin(cubin)
            self._kernel = self._code.get_kernel(KERNEL)
            kernel = driver.CUkernel(int(self._kernel.handle))
            function = check(driver.cuKernelGetFunction(kernel), "cuKernelGetFunction")
            if hasattr(driver, "cuFuncLoad"):  # from CUDA 12.4 on; asking an attribute loads too
                check(driver.cuFuncLoad(function), "cuFuncLoad")
            registers = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
            self.registers = int(
                check(driver.cuFuncGetAttribute(registers, function), "cuFuncGetAttribute")
            )
            shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            nbytes = settings.shared_nbytes
            check(
                driver.cuKernelSetAttribute(shared, nbytes, kernel, device.ordinal),
                "cuKernelSetAttribute",
            )
            blocks = self._kernel.occupancy.max_active_blocks_per_multiprocessor(
                settings.threads, settings.shared_nbytes
            )
        self.resident_blocks = int(blocks) * device.capabilities.multiprocessor_count

    def launch(self, stream: Stream, blocks: int, launches_ptr: int) -> None:
        """Launch cooperatively; `launches_ptr` is a device array of KernelRing, one a ring."""
        from cuda.core import LaunchConfig, launch
        from cuda.core import Stream as CoreStream

        sizes = {
            "grid": blocks,
            "block": self.settings.threads,
            "shmem_size": self.settings.shared_nbytes,
        }
        with current_context(self.device, "launching the ring kernel"):
            try:
                config = LaunchConfig(**sizes, is_cooperative=True)
            except TypeError:  # the name in cuda.core before 1.2
                config = LaunchConfig(**sizes, cooperative_launch=True)
            submitted_to = CoreStream.from_handle(stream.handle)  # ours to close, not its
            launch(submitted_to, config, self._kernel, launches_ptr)


def load_kernel(device: Device, cubin: bytes, settings: LoopSettings) -> LoadedKernel:
    """Load a kernel, or return the one that is loaded."""
    key = (device.ordinal, hashlib.sha256(cubin).digest())
    with _lock:
        found = _loaded.get(key)
    if found is None:
        found = LoadedKernel(device, cubin, settings)
        with _lock:
            found = _loaded.setdefault(key, found)
    return found


class Residency:
    """How much of each device the running ring kernels of this process take.

    A cooperative launch waits until all its blocks fit. Behind kernels that never end that would be
    for ever, so it is refused before.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: weakref.WeakKeyDictionary[Any, tuple[int, float]] = (
            weakref.WeakKeyDictionary()
        )

    def enter(self, owner: Any, kernel: LoadedKernel, rings: int) -> None:
        """Note a launch of `rings` rings, or refuse it.

        Raises
        ------
        NotSupportedError
            They do not all fit beside what runs.
        """
        blocks = kernel.settings.blocks
        ordinal = kernel.device.ordinal
        with self._lock:
            taken = sum(share for device, share in self._running.values() if device == ordinal)
            fitting = int(kernel.resident_blocks * max(1.0 - taken, 0.0) + 1e-6) // blocks
            if rings > fitting:
                beside = ", beside the ring kernels that run there already" if taken else ""
                raise NotSupportedError(
                    f"rings={rings} with blocks={blocks} of {kernel.settings.threads} threads and "
                    f"{kernel.settings.shared_nbytes} bytes of shared memory cannot be resident at "
                    f"once on {kernel.device.name}{beside}: {fitting} rings fit; use fewer rings, "
                    "blocks or workers"
                )
            self._running[owner] = (ordinal, rings * blocks / kernel.resident_blocks)
            _native.hold_releases(True)

    def leave(self, owner: Any) -> None:
        """Note the end of a launch."""
        with self._lock:
            self._running.pop(owner, None)
            _native.hold_releases(bool(self._running))


residency = Residency()
