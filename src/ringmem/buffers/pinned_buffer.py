"""Page-locked host memory: new, or memory that exists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ringmem.buffers.arguments import flag, refuse_masked
from ringmem.buffers.base import Buffer
from ringmem.buffers.kinds import Kind
from ringmem.device import Device
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError, NotSupportedError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

__all__ = ["PinnedBuffer", "pin"]


class PinnedBuffer(Buffer):
    """Page-locked host memory, which devices copy from and to at full speed, asynchronously.

    It has one address for the host and (see :attr:`device_ptr`) for kernels. Page-locking is slow
    (1.3 ms for 1 MiB): keep the buffer, or take it from a pool. Giving it back waits for kernels,
    so a background thread does it, after the work on all streams that used the buffer.

    Parameters
    ----------
    shape, dtype, device, stream, allocator
        As for :class:`DeviceBuffer`. The allocator gives page-locked memory; by default the
        driver does. `device` is the one whose driver locks the pages; every device of that driver
        can use them.
    write_combined : bool, default False
        Faster for the device to read, very slow for the host to read. Not with `allocator`.

    Raises
    ------
    InvalidValueError, OutOfMemoryError, InvalidDeviceError, ClosedError
        As for :class:`DeviceBuffer`.

    Examples
    --------
    >>> from ringmem import PinnedBuffer
    >>> with PinnedBuffer(4, "i4", device="cpu") as buffer:
    ...     buffer.fill(7)
    ...     buffer.to_numpy().tolist()
    [7, 7, 7, 7]
    """

    __slots__ = ()

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: DTypeLike | None = None,
        *,
        device: Device | str | None = None,
        stream: object | None = None,
        allocator: object | None = None,
        write_combined: bool = False,
    ) -> None:
        if flag("write_combined", write_combined):
            if allocator is not None:
                raise InvalidValueError(
                    "write_combined is True with an allocator: the allocator decides, give one"
                )
            device = _device_for(device, stream)
            allocator = _native.PinnedAllocator(device, True)
        super().__init__(Kind.PINNED, shape, dtype, device, stream, allocator)

    def _empty_like(self, stream: object | None) -> PinnedBuffer:
        return PinnedBuffer(self.shape, self.dtype, device=self.device, stream=stream)

    @property
    def device_ptr(self) -> int:
        """int: the address that kernels use; the same as ``ptr`` on all but old platforms."""
        ptr = self.ptr
        return self.device.driver.host_device_pointer(self.device.ordinal, ptr) if ptr else 0

    def numpy(self, *, readonly: bool = False) -> NDArray[Any]:
        """Return an array over the memory: a live window, which waits for nothing.

        Synchronize the stream of a copy before you read what it wrote (``np.asarray(buffer)``
        does that for you). The buffer cannot be closed while the array, or a view of it, lives.

        Parameters
        ----------
        readonly : bool, default False
            The array must not be written.

        Raises
        ------
        InvalidValueError
            The memory is read-only and `readonly` is False.
        ClosedError
            The buffer is closed.
        """
        return self._host_array(flag("readonly", readonly), wait=False)


def pin(
    array: NDArray[Any],
    *,
    device: Device | str | None = None,
    stream: object | None = None,
) -> PinnedBuffer:
    """Page-lock memory that exists, without a copy.

    Parameters
    ----------
    array : numpy.ndarray
        C-contiguous. A read-only array needs a device that can lock such pages.
    device : Device or str, optional
        By default the stream's, else :func:`ringmem.default_device`.
    stream : stream-like, optional
        Of the device; by default the thread's current one.

    Returns
    -------
    PinnedBuffer
        On the array's memory, which it keeps alive. Closing it unlocks the pages in the
        background, after the work that used them; until then the array is kept.

    Raises
    ------
    InvalidValueError
        Not an array, not contiguous, masked elements, or a dtype that cannot be held.
    NotSupportedError
        The device cannot lock existing memory, or not read-only memory.
    DriverError
        The driver refused, for instance because some page is locked already.

    Examples
    --------
    >>> import numpy as np
    >>> import ringmem
    >>> array = np.zeros(1000)
    >>> with ringmem.pin(array, device="cpu") as buffer:
    ...     buffer.ptr == array.ctypes.data
    True
    """
    if not isinstance(array, np.ndarray):
        raise InvalidValueError(f"array is a {type(array).__name__}: give a NumPy array")
    refuse_masked("array", array)
    if not array.flags.c_contiguous:
        raise InvalidValueError(
            f"array has shape {array.shape} and strides {array.strides}: only contiguous memory "
            "can be pinned; give np.ascontiguousarray(array)"
        )
    owner = _device_for(device, stream)
    readonly = not array.flags.writeable
    if not owner.capabilities.host_register:
        raise NotSupportedError(
            f"{owner.name} cannot lock memory that exists: copy into a PinnedBuffer"
        )
    if readonly and not owner.capabilities.read_only_host_register:
        raise NotSupportedError(
            f"array is read-only, which {owner.name} cannot lock: give a writable array, or copy "
            "into a PinnedBuffer"
        )
    address = array.__array_interface__["data"][0]
    return cast(
        PinnedBuffer,
        _native.pin_memory(address, array.shape, array.dtype, owner, stream, readonly, array),
    )


def _device_for(device: Device | str | None, stream: object | None) -> Device:
    if device is None and isinstance(stream, _native.StreamBase):
        return cast(Device, stream.device)
    return Device(device)
