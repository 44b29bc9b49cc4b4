"""The integer handle that a stream-like object carries, and the device that it belongs to.

Nothing is imported for it: other libraries' streams are known by their attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ringmem.device.scalars import to_integer
from ringmem.native import _native
from ringmem.native.errors import ClosedError, DriverError, InvalidValueError

if TYPE_CHECKING:
    from ringmem.device.device import Device

__all__ = ["OTHER", "STREAM", "Argument", "device_of_handle", "handle_of"]

# CUDA_ERROR_INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE and CONTEXT_IS_DESTROYED: what a driver
# answers about a handle that is no stream (any more).
_DEAD_HANDLE = frozenset({1, 201, 400, 709})


class Argument(NamedTuple):
    """What an error about a stream-like calls it, and what would do."""

    name: str
    wanted: str


_FOREIGN = (
    "an object with __cuda_stream__, a stream of PyTorch, CuPy, Numba or cuda.core, or an "
    "integer handle"
)
STREAM = Argument("stream", f"None, a Stream, {_FOREIGN}")
OTHER = Argument("other", f"an Event, a Stream, {_FOREIGN}")


def handle_of(stream: object, argument: Argument) -> int:
    """Return the integer handle that a stream-like object carries."""
    handle = to_integer(_handle_candidate(stream, argument))
    if handle is not None and 0 <= handle < 1 << 64:
        return handle
    raise InvalidValueError(f"{argument.name} is {stream!r}: give {argument.wanted}")


def _handle_candidate(stream: object, argument: Argument) -> Any:
    if isinstance(stream, type):  # has the protocol, but is no stream: as_stream(Stream, …)
        return None
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            return None
        version, handle = pair
        if version != 0:
            raise InvalidValueError(
                f"{argument.name} is {stream!r}: version {version} of __cuda_stream__ is unknown; "
                "0 would do"
            )
        return handle
    # Memory and events have a handle, or an address, that is no stream's.
    if isinstance(stream, _native.EventBase) or hasattr(stream, "__dlpack__"):
        return None
    for attribute in ("cuda_stream", "ptr", "handle"):  # PyTorch; CuPy; Numba and cuda.core
        value = getattr(stream, attribute, None)
        if value is not None:
            # Numba wraps the number in a ctypes pointer, whose value is None for 0.
            return (value.value or 0) if hasattr(value, "value") else value
    return stream


def device_of_handle(handle: int, stream: object, device: Device, argument: Argument) -> Device:
    """Return the device that the driver of `device` says a stream belongs to."""
    from ringmem.device.platforms import device_of

    try:
        ordinal = device.driver.stream_device(handle)
    except DriverError as error:
        if error.code in _DEAD_HANDLE:
            raise ClosedError(
                f"{argument.name} is {stream!r}: the driver of {device.name} knows no stream "
                f"{handle:#x}; it was destroyed, or belongs to another driver: give an open stream "
                f"of {device.name}"
            ) from error
        raise
    return device_of(device.driver, ordinal)
