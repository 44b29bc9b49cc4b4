"""Functions that make device buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ringmem.buffers.arguments import refuse_masked
from ringmem.buffers.device_buffer import DeviceBuffer
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

    from ringmem.device import Device

__all__ = ["empty", "from_array", "full", "track_allocation_places", "zeros"]


if TYPE_CHECKING:

    def empty(
        shape: int | tuple[int, ...],
        dtype: DTypeLike | None = None,
        *,
        device: Device | str | None = None,
        stream: object | None = None,
        allocator: object | None = None,
    ) -> DeviceBuffer:
        """Allocate device memory with undefined content; the same as :class:`DeviceBuffer`.

        Examples
        --------
        >>> import ringmem
        >>> ringmem.empty((2, 3), "f4", device="cpu").nbytes
        24
        """
else:
    empty = _native.empty


def zeros(
    shape: int | tuple[int, ...],
    dtype: DTypeLike | None = None,
    *,
    device: Device | str | None = None,
    stream: object | None = None,
    allocator: object | None = None,
) -> DeviceBuffer:
    """Allocate device memory and set its bytes to 0, in stream order.

    Parameters
    ----------
    shape, dtype, device, stream, allocator
        As for :class:`DeviceBuffer`, and so are the errors. When filling fails the memory is given
        back.

    Examples
    --------
    >>> import ringmem
    >>> ringmem.zeros(3, "i4", device="cpu").to_numpy().tolist()
    [0, 0, 0]
    """
    buffer = empty(shape, dtype, device=device, stream=stream, allocator=allocator)
    try:
        _native.buffer_fill(buffer, bytes(buffer.itemsize))
    except BaseException:
        buffer.close()
        raise
    return buffer


def full(
    shape: int | tuple[int, ...],
    fill_value: Any,
    dtype: DTypeLike | None = None,
    *,
    device: Device | str | None = None,
    stream: object | None = None,
    allocator: object | None = None,
) -> DeviceBuffer:
    """Allocate device memory and set every element, in stream order.

    Parameters
    ----------
    fill_value : scalar or tuple
        Anything that one element can hold, as for :meth:`Buffer.fill`.
    dtype : dtype-like, optional
        By default that of ``np.asarray(fill_value)``.
    shape, device, stream, allocator
        As for :class:`DeviceBuffer`.

    Examples
    --------
    >>> import ringmem
    >>> ringmem.full(2, 1.5, device="cpu").to_numpy().tolist()
    [1.5, 1.5]
    """
    if dtype is None:
        dtype = _as_array("fill_value", fill_value).dtype
    buffer = empty(shape, dtype, device=device, stream=stream, allocator=allocator)
    try:
        buffer.fill(fill_value)
    except BaseException:
        buffer.close()
        raise
    return buffer


def _as_array(argument: str, value: ArrayLike) -> NDArray[Any]:
    refuse_masked(argument, value)
    try:
        return np.asarray(value)
    except ValueError as error:  # NumPy's word for a ragged list
        raise InvalidValueError(
            f"{argument} is {value!r:.80}: give an array or lists of equal length ({error})"
        ) from error


def from_array(
    array: ArrayLike,
    *,
    device: Device | str | None = None,
    stream: object | None = None,
    allocator: object | None = None,
) -> DeviceBuffer:
    """Copy a host array, strided as it may be, to new device memory.

    Parameters
    ----------
    array : array-like
        What :func:`numpy.asarray` takes; not of objects.
    device, stream, allocator
        As for :class:`DeviceBuffer`.

    Returns
    -------
    DeviceBuffer
        Of the array's shape and dtype. The array may be changed when the call returns, unless it
        is over a PinnedBuffer, which is copied asynchronously.

    Raises
    ------
    InvalidValueError
        `array` is no array, for instance a ragged list, or has masked elements; what
        :class:`DeviceBuffer` raises.

    Examples
    --------
    >>> import numpy as np
    >>> import ringmem
    >>> ringmem.from_array(np.arange(6)[::2], device="cpu").to_numpy().tolist()
    [0, 2, 4]
    """
    source = _as_array("array", array)
    buffer = empty(source.shape, source.dtype, device=device, stream=stream, allocator=allocator)
    try:
        buffer.copy_from(source)
    except BaseException:
        buffer.close()
        raise
    return buffer


def track_allocation_places(on: bool = True) -> bool:
    """Remember where buffers are allocated, so that the warning about a lost one says so.

    Costs some microseconds a buffer. The environment variable ``RINGMEM_TRACK_PLACES=1`` has it on
    from the beginning.

    Parameters
    ----------
    on : bool, default True
        For buffers that are made from now on, in all threads.

    Returns
    -------
    bool
        What was set before.

    Examples
    --------
    >>> from ringmem import track_allocation_places
    >>> before = track_allocation_places()
    >>> track_allocation_places(before)
    True
    """
    return _native.track_allocation_places(bool(on))
