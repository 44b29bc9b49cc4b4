"""Bounds of the whole process: mappings, and handles kept for reuse."""

from __future__ import annotations

from ringmem.device import Device
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError

__all__ = ["live_mappings", "mapping_limit", "recycle_limit", "set_recycle_limit"]


def live_mappings() -> int:
    """Return how many mappings made through :mod:`ringmem.virtual` are live in the process."""
    return _native.live_mappings()


def mapping_limit(device: Device | str | None = None) -> int | None:
    """Return how many mappings the process may hold, or None where no bound is known.

    On CPU devices every mapping is a memory area of the kernel (``vm.max_map_count``, 65,530 by
    default; one in the middle of a range counts twice). Mapping beyond the bound raises
    :class:`OutOfMemoryError` before the kernel refuses.

    Examples
    --------
    >>> from ringmem.virtual import mapping_limit
    >>> mapping_limit("cpu") > 1000
    True
    """
    return _native.mapping_limit(Device(device)) or None


def recycle_limit() -> int:
    """Return how many bytes of handles are kept for reuse, for each kind of memory."""
    return _native.recycle_limit()


def set_recycle_limit(nbytes: int) -> None:
    """Keep at most `nbytes` of handles for reuse, for each kind of memory on each device.

    Handles that a growable buffer gave back are filled with zero by the mapping thread and handed
    to the next buffer that grows. They count as used memory of the device, and are released when
    memory runs out or the last buffer of their kind is closed. By default 64 MiB.

    Raises
    ------
    InvalidValueError
        `nbytes` is negative.
    """
    if nbytes < 0:
        raise InvalidValueError(f"nbytes is {nbytes}: give 0 (keep none) or more")
    _native.set_recycle_limit(nbytes)
