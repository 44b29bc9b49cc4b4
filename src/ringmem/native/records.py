"""Batches of messages as bytes, for native code: what fits as it is, what converts, what does not.

Called only when a batch is not already a contiguous array of exactly the message dtype. NumPy reads
text as numbers, the bytes of a buffer as so many values, and puts one value into every field: none
of that is what somebody who sends it means, so it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ringmem.native.errors import InvalidValueError

__all__ = ["as_bytes", "as_writable_bytes"]

_BYTES = ("B", "b", "c")  # formats of a memoryview whose elements are bytes
_NO_BUFFER = (list, int, float, str, range)  # types that are frequent, and no buffers
_SINGLE = (tuple, int, float, complex, str, bytes, bytearray, memoryview, np.generic, type(None))


def as_bytes(batch: Any, message: np.dtype[Any], name: str = "batch") -> npt.NDArray[np.uint8]:
    """Return the messages of `batch` as contiguous bytes, copied if need be.

    Parameters
    ----------
    batch : array-like
        An array of the message dtype, one record, the bytes of exactly one record (bytes,
        bytearray, memoryview), or what NumPy converts to that dtype (a tuple, a list of tuples, a
        number where there is one field). An array or buffer of another dtype is refused:
        converting one is a decision.
    message : numpy.dtype
        Of one message.
    name : str
        What errors call the batch.

    Raises
    ------
    InvalidValueError
        The batch is of another dtype or cannot be converted.
    """
    kind = type(batch)
    number = (kind is int or kind is float) and (message.names is None or len(message.names) == 1)
    if kind is not tuple and not number:  # which are by far the most frequent
        batch = _checked(batch, message, name)
    try:
        array = np.ascontiguousarray(batch, dtype=message)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValueError(
            f"{name}={batch!r:.80} is not of the {_kind(name)} dtype {message}: {error}"
        ) from error
    return array.reshape(-1).view(np.uint8)


def as_writable_bytes(array: Any, message: np.dtype[Any]) -> npt.NDArray[np.uint8]:
    """Return the memory of `array`, an array of the message dtype to receive into, as bytes.

    Raises
    ------
    InvalidValueError
        It is no array, of another dtype, read-only, or not C-contiguous.
    """
    if not isinstance(array, np.ndarray) or not _same(array.dtype, message):
        kind = f"dtype {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidValueError(f"out is of {kind}; it must be an array of dtype {message}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise InvalidValueError("out must be C-contiguous and writable")
    return array.reshape(-1).view(np.uint8)


# --- what NumPy would misread --------------------------------------------------------------------
def _checked(batch: Any, message: np.dtype[Any], name: str) -> Any:
    """Return the batch, or its memory as an array of the message dtype."""
    if isinstance(batch, _NO_BUFFER) and not isinstance(batch, np.generic):
        _check_first(batch, message, name)
        return batch
    if not isinstance(batch, np.ndarray | np.generic):
        if hasattr(batch, "__array__") or hasattr(batch, "__array_interface__"):
            batch = np.asarray(batch)
        else:
            try:
                memory = memoryview(batch)
            except TypeError:
                _check_first(batch, message, name)
                return batch
            return _of_buffer(batch, memory, message, name)
    if not _same(batch.dtype, message):
        raise InvalidValueError(
            f"{name} of dtype {batch.dtype} ({batch.dtype.itemsize} bytes) is not of the "
            f"{_kind(name)} dtype {message} ({message.itemsize} bytes); convert it with astype()"
        )
    return batch


def _of_buffer(batch: Any, memory: memoryview, message: np.dtype[Any], name: str) -> Any:
    """Return a buffer as an array of the message dtype: it is one, or one record's bytes."""
    try:
        array = np.asarray(memory)
    except (TypeError, ValueError):  # a format that NumPy does not know
        array = None
    if array is not None and _same(array.dtype, message):
        return array
    if memory.format in _BYTES:
        if memory.nbytes == message.itemsize:
            return np.frombuffer(memory.tobytes(), message)
        if message.kind == "S" and isinstance(batch, bytes) and len(batch) < message.itemsize:
            return np.array(batch, message)
    raise InvalidValueError(
        f"{name}={batch!r:.80} has {memory.nbytes} bytes of format {memory.format!r}; bytes are "
        f"taken as they are for one {_kind(name)}, of dtype {message} and {message.itemsize} "
        "bytes; give numbers as numbers, and many records as an array (numpy.frombuffer)"
    )


def _check_first(batch: Any, message: np.dtype[Any], name: str) -> None:
    """Look at the first of what may be a list of lists of messages."""
    first = batch
    while isinstance(first, list) or (
        not isinstance(first, _SINGLE) and isinstance(first, Sequence)
    ):
        if not len(first):
            return
        first = first[0]
    names = message.names
    if names is not None and len(names) > 1:
        if not isinstance(first, tuple) and getattr(first, "dtype", None) != message:
            _refuse(batch, message, name)
    elif first is None:  # which NumPy would read as not-a-number
        _refuse(batch, message, name)
    elif isinstance(first, str | bytes | bytearray | memoryview):
        only = (message[0] if names else message).base
        if only.kind not in ("SU" if isinstance(first, str) else "SV"):
            _refuse(batch, message, name)


def _refuse(batch: Any, message: np.dtype[Any], name: str) -> NoReturn:
    many = len(message.names or ()) > 1
    would_do = "a tuple, a value a field, for one, or a list of tuples" if many else "numbers"
    raise InvalidValueError(
        f"{name}={batch!r:.80} is not of the {_kind(name)} dtype {message}: give {would_do}"
    )


def _kind(name: str) -> str:
    return "message" if name == "batch" else name


def _same(left: np.dtype[Any], right: np.dtype[Any]) -> bool:
    return left == right and left.itemsize == right.itemsize
