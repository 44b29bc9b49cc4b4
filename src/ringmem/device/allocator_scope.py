"""What ``device.use(allocator)`` returns."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from ringmem.device.device import Device

__all__ = ["AllocatorScope"]


class AllocatorScope:
    """What :meth:`Device.use` returns: nothing changes before the ``with`` that enters it.

    Enter and leave it on one thread.
    """

    def __init__(self, device: Device, allocator: object) -> None:
        self._device = device
        self._allocator = allocator
        self._entered = False

    def __enter__(self) -> Device:
        self._entered = True
        self._device.push_allocator(self._allocator)
        return self._device

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._device.pop_allocator()

    def __del__(self) -> None:
        if not self._entered:
            warnings.warn(
                f"{self._device.name}.use(…) changes nothing outside a with statement",
                RuntimeWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"<AllocatorScope of {self._device.name}, for a with: {self._allocator!r}>"
