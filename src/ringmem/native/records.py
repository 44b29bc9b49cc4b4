"""Batches of messages as bytes, for native code: what fits as it is, what converts, what does not.

Called only when a batch is not already a contiguous array of exactly the message dtype. NumPy reads
text as numbers, the bytes of a buffer as so many values, cuts fractions off for integers, and puts
one value into every field: none of that is what somebody who sends it means, so it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ringmem.native.errors import InvalidValueError

__all__ = ["as_bytes", "as_writable_bytes"]

_BYTES = ("B", "b", "c")  # formats of a memoryview whose elements are bytes
_NO_BUFFER = (tuple, list, int, float, str, range)  # types that are frequent, and no buffers
_SINGLE = (tuple, range, int, float, complex, str, bytes, bytearray, memoryview, np.generic)
_NOT_A_NUMBER = (str, bytes, bytearray, memoryview, type(None))
_TAKES = {str: "SUMm", np.str_: "SUMm", type(None): ""}  # kinds of fields; bytes go into S and V


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
    if not _is_plain(batch, message):
        batch = _checked(batch, message, name)
    try:
        array = np.ascontiguousarray(batch, dtype=message)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValueError(
            f"{name}={batch!r:.80} is not of the {_kind(name)} dtype {message}: {error}"
        ) from error
    return array.reshape(-1).view(np.uint8)


def as_writable_bytes(
    array: Any, message: np.dtype[Any], name: str = "out"
) -> npt.NDArray[np.uint8]:
    """Return the memory of `array`, an array of dtype `message` to receive into, as bytes.

    Raises
    ------
    InvalidValueError
        It is no array, of another dtype, read-only, or not C-contiguous.
    """
    if not isinstance(array, np.ndarray) or not _same(array.dtype, message):
        kind = f"dtype {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidValueError(f"{name} is of {kind}; it must be an array of dtype {message}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise InvalidValueError(f"{name} must be C-contiguous and writable")
    return array.reshape(-1).view(np.uint8)


# --- what NumPy would misread --------------------------------------------------------------------
@functools.lru_cache(64)
def _plain_values(message: np.dtype[Any]) -> tuple[int, frozenset[type]]:
    """Return how many values a message takes, 0 where one is a record itself, and their types."""
    fields = [message[i] for i in range(len(message.names))] if message.names else [message]
    nested = any(field.base.names is not None for field in fields)
    real = all(field.base.kind in "fc" for field in fields)
    return 0 if nested else len(fields), frozenset((int, bool, float) if real else (int, bool))


def _is_plain(batch: Any, message: np.dtype[Any]) -> bool:
    """Whether a batch is numbers or tuples of them, which NumPy cannot misread."""
    fields, numbers = _plain_values(message)
    if fields == 0:
        return False
    if type(batch) is tuple:
        return numbers.issuperset(map(type, batch))
    if type(batch) is not list:
        return fields == 1 and type(batch) in numbers
    kinds = set(map(type, batch))
    if kinds == {tuple}:
        return numbers.issuperset(map(type, chain.from_iterable(batch)))
    return fields == 1 and kinds <= numbers


def _checked(batch: Any, message: np.dtype[Any], name: str) -> Any:
    """Return the batch, or its memory as an array of the message dtype."""
    if isinstance(batch, _NO_BUFFER) and not isinstance(batch, np.generic):
        _check_values(batch, message, lambda value: _refuse(batch, message, name, value))
        return batch
    if not isinstance(batch, np.ndarray | np.generic):
        if hasattr(batch, "__array__") or hasattr(batch, "__array_interface__"):
            batch = np.asarray(batch)
        else:
            try:
                memory = memoryview(batch)
            except TypeError:
                _check_values(batch, message, lambda value: _refuse(batch, message, name, value))
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


def _check_values(value: Any, dtype: np.dtype[Any], refuse: Callable[[Any], NoReturn]) -> None:
    """Look at every value of one message or many; arrays are what NumPy says they are."""
    if dtype.base.names is not None:
        _check_records(value, dtype.base, refuse)
    elif isinstance(value, tuple) or _is_list(value):
        for one in value:
            _check_values(one, dtype, refuse)
    elif isinstance(value, float):
        if dtype.base.kind in "iu" and not value.is_integer():
            refuse(value)
    elif isinstance(value, _NOT_A_NUMBER):
        if dtype.base.kind not in _TAKES.get(type(value), "SV"):
            refuse(value)
    elif getattr(value, "dtype", dtype.base).kind in "SU" and dtype.base.kind not in "SU":
        refuse(value)


def _check_records(value: Any, record: np.dtype[Any], refuse: Callable[[Any], NoReturn]) -> None:
    """Look at the values of each field."""
    names = record.names or ()
    if isinstance(value, tuple):
        if len(value) == len(names):  # else NumPy says it better
            for one, name in zip(value, names, strict=True):
                _check_values(one, record[name], refuse)
    elif _is_list(value):
        for one in value:
            _check_records(one, record, refuse)
    elif len(names) == 1:
        _check_values(value, record[0], refuse)
    elif getattr(value, "dtype", None) != record:  # which NumPy would put into every field
        refuse(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) or (
        not isinstance(value, _SINGLE) and isinstance(value, Sequence)
    )


def _refuse(batch: Any, message: np.dtype[Any], name: str, value: Any = None) -> NoReturn:
    many = len(message.names or ()) > 1
    would_do = "a tuple, a value a field, for one, or a list of tuples" if many else "numbers"
    what = "" if value is batch else f", with {value!r:.40} in it,"
    raise InvalidValueError(
        f"{name}={batch!r:.80}{what} is not of the {_kind(name)} dtype {message}: give {would_do}"
    )


def _kind(name: str) -> str:
    return "message" if name == "batch" else name


def _same(left: np.dtype[Any], right: np.dtype[Any]) -> bool:
    return left == right and left.itemsize == right.itemsize
