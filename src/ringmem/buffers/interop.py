"""Memory of other libraries as buffers, and ours on request for theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ringmem.buffers.arguments import optional_flag, refuse_masked
from ringmem.buffers.array_interface import borrow_array_interface
from ringmem.buffers.dlpack import borrow_dlpack
from ringmem.buffers.kinds import Kind
from ringmem.device import Device, as_stream
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ringmem.buffers.base import Buffer

__all__ = ["as_buffer", "borrow_array", "borrow_foreign", "from_dlpack"]


def borrow_array(array: NDArray[Any], stream: object | None = None, name: str = "obj") -> Buffer:
    """Return a buffer on an array's memory; `name` is the argument that the array was.

    Raises
    ------
    InvalidValueError
        The array is not C-contiguous, has masked elements, or its dtype cannot be held.
    """
    refuse_masked(name, array)
    if not array.flags.c_contiguous:
        raise InvalidValueError(
            f"the array of shape {array.shape} has strides {array.strides}: buffers are "
            "contiguous; give np.ascontiguousarray(array), or copy_from(array)"
        )
    host = Device("cpu")
    address = array.__array_interface__["data"][0]
    return cast(
        "Buffer",
        _native.borrow_memory(
            Kind.HOST,
            address,
            array.shape,
            array.dtype,
            host,
            None if stream is None else as_stream(stream, host),
            not array.flags.writeable,
            array,
        ),
    )


def borrow_foreign(
    holder: Any, argument: str, device: Device | None = None, stream: object | None = None
) -> Buffer:
    """Return a buffer on whatever memory an object offers, by the first protocol that it has."""
    if hasattr(holder, "__cuda_array_interface__"):
        place = device if device is not None and device.platform == "cuda" else None
        return borrow_array_interface(holder, place, stream)
    if isinstance(holder, np.ndarray):
        return borrow_array(holder, stream, argument)
    if hasattr(holder, "__dlpack__"):
        return borrow_dlpack(holder, None, stream)
    try:
        view = memoryview(holder)
    except (TypeError, BufferError, ValueError):
        raise InvalidValueError(
            f"{argument} is a {type(holder).__name__}: give a buffer, a NumPy array, or an object "
            "with __cuda_array_interface__, __dlpack__ or the buffer protocol"
        ) from None
    return borrow_array(np.asarray(view), stream)


def as_buffer(
    obj: object, *, device: Device | str | None = None, stream: object | None = None
) -> Buffer:
    """Look at memory of another library as a buffer, without a copy.

    Parameters
    ----------
    obj : object
        A ringmem buffer (returned as it is), a NumPy array, or an object with
        ``__cuda_array_interface__``, ``__dlpack__`` or the buffer protocol, tried in this order.
    device : Device or str, optional
        Where the address is valid; needed only where the protocol does not say.
    stream : stream-like, optional
        Of the memory's device; by default the current one. Work on the buffer goes there unless
        another is given, after the producer's work.

    Returns
    -------
    Buffer
        Keeps `obj` alive until it is closed. Host memory becomes a DeviceBuffer of ``cpu:0``.

    Raises
    ------
    InvalidValueError
        `obj` offers no memory, or not contiguous memory, or has masked elements.

    Examples
    --------
    >>> import numpy as np
    >>> import ringmem
    >>> array = np.arange(4)
    >>> with ringmem.as_buffer(array) as buffer:
    ...     buffer.nbytes, buffer.ptr == array.ctypes.data
    (32, True)
    """
    if isinstance(obj, _native.BufferBase):
        buffer = cast("Buffer", obj)
        buffer.ptr  # noqa: B018 - ClosedError for a closed one
        return buffer
    return borrow_foreign(obj, "obj", None if device is None else Device(device), stream)


def from_dlpack(
    obj: Any,
    *,
    device: Device | str | None = None,
    copy: bool | None = None,
    stream: object | None = None,
) -> Buffer:
    """Make a buffer of an object that speaks DLPack (0.x or 1.x).

    Parameters
    ----------
    obj : object
        With ``__dlpack__`` and ``__dlpack_device__``: an array of NumPy, PyTorch, CuPy, JAX.
    device : Device or str, optional
        Where the buffer shall be; by default where the memory is (host memory: ``cpu:0``).
    copy : bool, optional
        True: always into new memory. False: never, refuse instead. None: only where needed.
    stream : stream-like, optional
        Of the memory's device: the producer makes this stream wait for its work. By default the
        current one.

    Returns
    -------
    Buffer
        It keeps `obj`'s memory alive until it is closed, or owns a copy.

    Raises
    ------
    InvalidValueError
        No DLPack, not contiguous, masked elements, a type that cannot be held, or a copy is needed
        and refused.
    NotInitializedError
        The memory is on a CUDA device and there is no driver.

    Examples
    --------
    >>> import numpy as np
    >>> import ringmem
    >>> buffer = ringmem.from_dlpack(np.arange(3, dtype="f4"))
    >>> buffer.to_numpy().tolist()
    [0.0, 1.0, 2.0]
    """
    if not hasattr(obj, "__dlpack__") or not hasattr(obj, "__dlpack_device__"):
        raise InvalidValueError(
            f"obj is a {type(obj).__name__}: it has no __dlpack__; as_buffer() knows other ways"
        )
    copy = optional_flag("copy", copy)
    borrowed = borrow_dlpack(obj, False if copy is False else None, stream)
    wanted = None if device is None else Device(device)
    if copy is not True and (wanted is None or wanted is borrowed.device):
        return borrowed
    if copy is False:
        raise InvalidValueError(
            f"copy is False, but the memory is on {borrowed.device.name} and device is "
            f"{_native.name_beside(cast(Device, wanted), borrowed.device)}: allow the copy"
        )
    return _copied(borrowed, wanted)


def _copied(borrowed: Buffer, wanted: Device | None) -> Buffer:
    from ringmem.buffers.create import empty

    with borrowed:
        device = borrowed.device if wanted is None else wanted
        order = borrowed.stream if device is borrowed.device else None
        fresh = empty(borrowed.shape, borrowed.dtype, device=device, stream=order)
        try:
            fresh.copy_from(borrowed)
            # The producer may reuse its memory when the borrowed buffer is gone.
            _native.buffer_synchronize(borrowed)
        except BaseException:
            fresh.close()
            raise
        return fresh
