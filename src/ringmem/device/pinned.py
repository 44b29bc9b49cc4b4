"""Small pinned blocks that floor 1 uses for itself, kept for reuse.

Freeing pinned memory waits for persistent kernels, so nothing here is freed on a normal path: a
block goes back to its device and is used again. The devices of a platform live as long as the
process; with the device of an explicit driver, a simulation's say, its idle blocks go too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from ringmem.native.errors import RingmemError
from ringmem.native.locks import Lock

if TYPE_CHECKING:
    from ringmem.device.device import Device
    from ringmem.native import _native

__all__ = ["PinnedBlock", "give_back_pinned", "release_pinned", "take_pinned"]

_lock = Lock()  # guards the lists; never held around a driver call


class PinnedBlock:
    """Portable, mapped pinned memory, freed with its object unless it was given up."""

    def __init__(self, driver: _native.Driver, ordinal: int, nbytes: int) -> None:
        self._driver = driver  # not the device, which holds the idle blocks
        self._ordinal = ordinal
        self.nbytes = nbytes
        self.ptr = 0
        self.ptr = driver.host_alloc(ordinal, nbytes)

    def free(self) -> None:
        """Free the memory. Waits for **persistent kernels**. Idempotent."""
        ptr, self.ptr = self.ptr, 0
        if ptr:
            self._driver.host_free(self._ordinal, ptr)

    def give_up(self) -> None:
        """Never free the memory: the device may still write to it."""
        self.ptr = 0

    def __del__(
        self,
        # Kept here: at exit the module's own names may be gone already.
        finalizing: Callable[[], bool] = sys.is_finalizing,
        error_type: type[RingmemError] = RingmemError,
        warn: Callable[..., None] = warnings.warn,
    ) -> None:
        # At exit the system takes it back; freeing could wait for a kernel that never ends.
        if self.ptr and not finalizing():
            try:
                self.free()
            except error_type as error:
                warn(
                    f"{self.nbytes} bytes of pinned memory could not be freed: {error}",
                    ResourceWarning,
                    stacklevel=2,
                )


def _idle(device: Device) -> list[PinnedBlock]:
    """Return the device's idle blocks. Call with the lock."""
    idle: list[PinnedBlock] = device.__dict__.setdefault("_idle_pinned", [])
    return idle


def take_pinned(device: Device, nbytes: int) -> PinnedBlock:
    """Return a block of exactly `nbytes`, a used one where there is one.

    Raises
    ------
    DriverError
        The driver could not allocate it.
    """
    with _lock:
        idle = _idle(device)
        for index, block in enumerate(idle):
            if block.nbytes == nbytes:
                return idle.pop(index)
    return PinnedBlock(device.driver, device.ordinal, nbytes)


def give_back_pinned(device: Device, block: PinnedBlock) -> None:
    """Keep a block for the next one who wants its size. No work may be pending on it."""
    with _lock:
        _idle(device).append(block)


def release_pinned(device: Device) -> None:
    """Free the device's idle blocks. Waits for **persistent kernels**: not for normal paths.

    Raises
    ------
    DriverError
        A block could not be freed; it is lost, and those behind it are kept.
    """
    while True:
        with _lock:
            idle = _idle(device)
            block = idle.pop() if idle else None
        if block is None:
            return
        block.free()
