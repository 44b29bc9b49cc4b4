"""Memory of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringmem.buffers.arguments import flag
from ringmem.buffers.base import Buffer
from ringmem.buffers.kinds import Kind

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from ringmem.device import Device

__all__ = ["DeviceBuffer"]


class DeviceBuffer(Buffer):
    """Device memory with undefined content, allocated and freed in stream order.

    Parameters
    ----------
    shape : int or tuple of int
        Extents. Size 0 is valid with a dtype, and makes no driver call.
    dtype : dtype-like, optional
        Any NumPy dtype without objects, also structured ones, and those of ml_dtypes by name. By
        default raw bytes (``uint8``), of which there must be at least one.
    device : Device or str, optional
        By default the stream's, else :func:`ringmem.default_device`.
    stream : stream-like, optional
        The memory may be used in this stream's order; by default the thread's current stream.
    allocator : object, optional
        A pool, or an object with ``allocate(nbytes, stream)`` and
        ``deallocate(ptr, nbytes, stream)``. By default the innermost ``device.use(…)`` of this
        thread, else the driver's stream-ordered pool.

    Raises
    ------
    InvalidValueError
        Negative or overflowing shape, a dtype that memory cannot hold, no bytes.
    OutOfMemoryError
        The device has no more; :class:`~ringmem.AllocationFailedError` if the allocator returned a
        null address.
    InvalidDeviceError, ClosedError
        There is no such device; the stream is another device's, or closed.

    Examples
    --------
    >>> import numpy as np
    >>> from ringmem import DeviceBuffer
    >>> with DeviceBuffer((2, 3), "f4", device="cpu") as buffer:
    ...     buffer.copy_from(np.ones((2, 3), "f4"))
    ...     buffer[1].to_numpy().tolist()
    [1.0, 1.0, 1.0]
    """

    __slots__ = ()

    # The class itself is constructed natively (bind/buffer_factory.cpp); this is for subclasses.
    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: DTypeLike | None = None,
        *,
        device: Device | str | None = None,
        stream: object | None = None,
        allocator: object | None = None,
    ) -> None:
        super().__init__(Kind.DEVICE, shape, dtype, device, stream, allocator)

    def _empty_like(self, stream: object | None) -> DeviceBuffer:
        return DeviceBuffer(self.shape, self.dtype, device=self.device, stream=stream)

    def numpy(self, *, readonly: bool = False) -> NDArray[Any]:
        """Return an array over the memory of a CPU device; blocks until pending work is done.

        The buffer cannot be closed while the array, or a view of it, lives.

        Parameters
        ----------
        readonly : bool, default False
            The array must not be written.

        Raises
        ------
        NotSupportedError
            The host cannot read the memory: a GPU's, or a strict CPU device's. ``to_numpy()``
            copies it.
        """
        return self._host_array(flag("readonly", readonly), wait=True)
