"""NumPy views of a ring's slots that hide the sequences.

A slot is n lines of 64 bytes, each 8 bytes of sequence and status, then 56 bytes of payload. A
message of up to 56 bytes is one run of bytes and any dtype can view it. A larger one is in pieces
of 56: a structured dtype can view it where no field lies across a border.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmem.native import _native
from ringmem.native.errors import InvalidValueError

__all__ = ["Slots", "host_bytes", "message_dtype", "slot_dtype"]

LINE = int(_native.line_nbytes)
PAYLOAD = int(_native.line_payload_nbytes)
HEADER = int(_native.ring_header_nbytes)
SEQUENCE = LINE - PAYLOAD  # bytes before the payload


def message_dtype(message: npt.DTypeLike, name: str = "message") -> np.dtype[Any]:
    """Return `message` as a dtype that a ring can carry; errors call the argument `name`.

    Raises
    ------
    InvalidValueError
        It is no dtype, holds Python objects, has no bytes, or is a bare subarray.
    """
    if message is None:  # which NumPy would read as float64
        raise InvalidValueError(f"{name}=None is no dtype; give one, as in [('key', 'u8')]")
    try:
        dtype = np.dtype(message)
    except TypeError as error:
        raise InvalidValueError(f"{name}={message!r:.80} is no dtype: {error}") from error
    if dtype.hasobject:
        raise InvalidValueError(f"{name}={dtype} holds Python objects, which no peer can follow")
    if dtype.itemsize == 0:
        raise InvalidValueError(f"{name}={dtype} has no bytes; give its length, as in 'S16'")
    if dtype.subdtype is not None:
        raise InvalidValueError(
            f"{name}={dtype} is a bare subarray; name it, as in [('values', 'f4', 8)]"
        )
    return dtype


def slot_dtype(message: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype that views a message inside its slot, or None where there is none.

    Parameters
    ----------
    message : numpy.dtype
        Of one message as a contiguous record.

    Returns
    -------
    numpy.dtype or None
        To be placed at the first payload byte of a slot. None: a field lies across a border of 56
        bytes, so only a copy can show the message.

    Examples
    --------
    >>> slot_dtype(np.dtype([("a", "u8"), ("b", "f4")])) == np.dtype([("a", "u8"), ("b", "f4")])
    True
    >>> slot_dtype(np.dtype([("low", "V56"), ("high", "u8")])).fields["high"][1]
    64
    >>> slot_dtype(np.dtype("V100")) is None
    True
    """
    if message.itemsize <= PAYLOAD:
        return message
    if message.fields is None:
        return None
    names, formats, offsets = [], [], []
    for name in message.names or ():
        field, offset = message.fields[name][:2]
        first, last = offset // PAYLOAD, (offset + max(field.itemsize, 1) - 1) // PAYLOAD
        if first != last:
            return None
        names.append(name)
        formats.append(field)
        offsets.append(first * LINE + offset % PAYLOAD)
    lines = -(-message.itemsize // PAYLOAD)
    itemsize = lines * LINE - SEQUENCE
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize})


def host_bytes(ptr: int, nbytes: int, owner: object) -> Any:
    """Return a buffer over host memory at `ptr` that keeps `owner` alive."""
    raw = (ctypes.c_uint8 * nbytes).from_address(ptr)
    raw._owner = owner  # type: ignore[attr-defined]
    return raw


class Slots:
    """All slots of one ring, as arrays of `capacity` elements.

    Attributes
    ----------
    messages : numpy.ndarray or None
        The payloads; None where :func:`slot_dtype` has no view.
    statuses : numpy.ndarray
        The handler status that each slot carries (int32).
    """

    def __init__(self, raw: Any, message: np.dtype[Any], capacity: int) -> None:
        stride = -(-message.itemsize // PAYLOAD) * LINE
        view = slot_dtype(message)
        self.message = message
        self.capacity = capacity
        self.messages: npt.NDArray[Any] | None = None
        if view is not None:
            self.messages = np.ndarray(
                capacity, dtype=view, buffer=raw, offset=HEADER + SEQUENCE, strides=(stride,)
            )
        self.statuses: npt.NDArray[np.int32] = np.ndarray(
            capacity, dtype=np.int32, buffer=raw, offset=HEADER + 4, strides=(stride,)
        )

    def runs(self, array: npt.NDArray[Any], start: int, count: int) -> tuple[npt.NDArray[Any], ...]:
        """Return `count` elements from slot `start` on: none, one view, or two at the wrap."""
        if count == 0:
            return ()
        end = start + count
        if end <= self.capacity:
            return (array[start:end],)
        return (array[start:], array[: end - self.capacity])
