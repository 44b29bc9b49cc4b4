"""Small pinned blocks that floor 1 uses for itself, kept for reuse.

Freeing pinned memory waits for persistent kernels, so nothing here is freed on a normal path: a
block goes back to its device and is used again. They belong to the driver, not to the process: when
a simulation's driver goes, so do they.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringmem.device.device import Device

__all__ = ["give_back_pinned", "release_pinned", "take_pinned"]

_lock = threading.Lock()  # guards the lists; never held around a driver call


def _idle(device: Device) -> dict[int, list[int]]:
    """Return the device's idle blocks, by size. Call with the lock."""
    idle: dict[int, list[int]] = device.__dict__.setdefault("_idle_pinned", {})
    return idle


def take_pinned(device: Device, nbytes: int) -> int:
    """Return the address of a portable, mapped pinned block of `nbytes`."""
    with _lock:
        blocks = _idle(device).get(nbytes)
        if blocks:
            return blocks.pop()
    return device.driver.host_alloc(device.ordinal, nbytes)


def give_back_pinned(device: Device, nbytes: int, ptr: int) -> None:
    """Keep a block for the next one who wants this size. No work may be pending on it."""
    with _lock:
        _idle(device).setdefault(nbytes, []).append(ptr)


def release_pinned(device: Device) -> None:
    """Free the device's idle blocks. Waits for **persistent kernels**: not for normal paths.

    Raises
    ------
    DriverError
        A block could not be freed; it and those behind it are kept.
    """
    while True:
        with _lock:
            block = next(((n, b.pop()) for n, b in _idle(device).items() if b), None)
        if block is None:
            return
        nbytes, ptr = block
        try:
            device.driver.host_free(device.ordinal, ptr)
        except BaseException:
            give_back_pinned(device, nbytes, ptr)
            raise
