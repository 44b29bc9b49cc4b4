"""Memory of a CUDA ring kernel: pinned by this process, or shared and registered by it."""

from __future__ import annotations

from typing import Any

from ringmem.buffers import PinnedBuffer
from ringmem.device import Device
from ringmem.native.errors import NotSupportedError

__all__ = ["CudaRingMemory", "RegisteredRingMemory"]


class CudaRingMemory:
    """Pinned memory that a kernel reads and writes through the link."""

    def __init__(self, device: Device, nbytes: int) -> None:
        # On the default stream, which outlives the backend's own.
        self._buffer = PinnedBuffer(nbytes, device=device, stream=device.default_stream)
        self.ptr = self._buffer.ptr
        self.device_ptr = self._buffer.device_ptr
        self.nbytes = nbytes
        array = self._buffer.numpy()
        array[...] = 0
        del array

    def close(self) -> None:
        """Nothing to do: the pages go, by way of the reaper, when the last view of them is gone."""


class RegisteredRingMemory:
    """Shared memory of several processes that this one registers with the driver.

    It stays registered until the process ends: unregistering would wait for the kernel.

    Parameters
    ----------
    device : Device
        Whose kernel is to read and write it.
    native : object
        With ``ptr`` and ``nbytes``, whole pages; kept alive.

    Raises
    ------
    NotSupportedError
        The device cannot register memory.
    DriverError
        The driver refused.
    """

    def __init__(self, device: Device, native: Any) -> None:
        if not device.capabilities.host_register:
            raise NotSupportedError(
                f"{device.name} cannot register shared memory, which isolated=True needs; run your "
                "own program in a child instead"
            )
        self._native = native
        self.ptr = int(native.ptr)
        self.nbytes = int(native.nbytes)
        driver, ordinal = device.driver, device.ordinal
        driver.host_register(ordinal, self.ptr, self.nbytes, portable=True, mapped=True)
        self.device_ptr = int(driver.host_device_pointer(ordinal, self.ptr))

    def close(self) -> None:
        """Nothing to do: see above."""
