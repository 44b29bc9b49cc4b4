"""Buffers of floor 2 over memory of this floor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np

from ringmem.buffers import DeviceBuffer
from ringmem.device import current_stream
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from ringmem.device import Device, Stream

__all__ = ["as_shape", "borrow"]

_DEVICE_MEMORY = 0  # native MemoryKind.device


def as_shape(shape: int | tuple[int, ...], argument: str) -> tuple[int, ...]:
    """Return a shape as a tuple; negative extents are an :class:`InvalidValueError`."""
    extents = (shape,) if isinstance(shape, int) else tuple(int(extent) for extent in shape)
    if any(extent < 0 for extent in extents):
        raise InvalidValueError(f"{argument} is {shape!r}: extents are 0 or more")
    return extents


def borrow(
    *,
    ptr: int,
    limit: int,
    shape: int | tuple[int, ...] | None,
    dtype: npt.DTypeLike,
    device: Device,
    hold: object,
    read_only: bool = False,
    streams: Iterable[Stream] = (),
) -> DeviceBuffer:
    """Return a buffer at `ptr`, at most `limit` bytes long, that keeps `hold` alive.

    Every view is a buffer of its own and knows nothing of work that others submitted. So that what
    it exports is complete, it takes it that work is pending on the thread's current stream, and on
    `streams`.
    """
    kind = np.dtype(dtype)
    extents = (limit // kind.itemsize,) if shape is None else as_shape(shape, "shape")
    nbytes = math.prod(extents) * kind.itemsize
    if nbytes > limit:
        raise InvalidValueError(
            f"shape is {extents} of {kind}, {nbytes} bytes: there are only {limit}"
        )
    made = cast(
        "DeviceBuffer",
        _native.borrow_memory(_DEVICE_MEMORY, ptr, extents, kind, device, None, read_only, hold),
    )
    if nbytes:
        for stream in (current_stream(device), *streams):
            _native.buffer_note_use(made, stream)
    return made
