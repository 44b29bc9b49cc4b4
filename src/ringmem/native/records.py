"""Batches of messages as bytes, for native code: what fits as it is, what converts, what does not.

Called only when a batch is not already a contiguous array of exactly the message dtype. NumPy reads
text as numbers, the bytes of a buffer as so many values, cuts fractions off for integers, and puts
one value into every field: none of that is what somebody who sends it means, so it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ringmem.native.errors import InvalidValueError

__all__ = ["as_bytes", "as_writable_bytes"]

_BYTES = ("B", "b", "c")  # formats of a memoryview whose elements are bytes
_NO_BUFFER = (tuple, list, int, float, str, range)  # types that are frequent, and no buffers
_SINGLE = (tuple, range, int, float, complex, str, bytes, bytearray, memoryview, np.generic)
_NOT_A_NUMBER = (str, bytes, bytearray, memoryview, type(None))
_PYTHON: dict[str, tuple[type, ...]] = {
    **dict.fromkeys("biu", (bool, int)),
    **dict.fromkeys("fc", (bool, int, float)),
}
_SCALARS = tuple({np.dtype(code).type for code in "?bhilqBHILQefdg"})


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
def _plain_types(message: np.dtype[Any]) -> tuple[frozenset[type], ...]:
    """Return for each value of a message the types that NumPy takes for what they are."""
    fields = [message[i] for i in range(len(message.names))] if message.names else [message]
    return tuple(_types_of(field.base) for field in fields)


def _types_of(field: np.dtype[Any]) -> frozenset[type]:
    if field.kind not in _PYTHON:  # a record, text, time, a type of another library
        return frozenset()
    return frozenset((*_PYTHON[field.kind], *(t for t in _SCALARS if np.can_cast(t, field))))


def _is_plain(batch: Any, message: np.dtype[Any]) -> bool:
    """Whether a batch is numbers or tuples of them, which NumPy cannot misread."""
    types = _plain_types(message)
    if type(batch) is tuple:
        known = map(frozenset.__contains__, types, map(type, batch))
        return len(batch) == len(types) and all(known)
    if type(batch) is not list:
        return len(types) == 1 and type(batch) in types[0]
    kinds = set(map(type, batch))
    if kinds == {tuple}:  # of other lengths: NumPy refuses those
        columns = zip(types, zip(*batch, strict=False), strict=False)
        return all(kind.issuperset(map(type, column)) for kind, column in columns)
    return len(types) == 1 and kinds <= types[0]


def _checked(batch: Any, message: np.dtype[Any], name: str) -> Any:
    """Return the batch, or its memory as an array of the message dtype."""
    if isinstance(batch, _NO_BUFFER) and not isinstance(batch, np.generic):
        _check_all(batch, message, name)
        return batch
    if not isinstance(batch, np.ndarray | np.generic):
        if hasattr(batch, "__array__") or hasattr(batch, "__array_interface__"):
            batch = np.asarray(batch)
        else:
            try:
                memory = memoryview(batch)
            except TypeError:
                _check_all(batch, message, name)
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


def _check_all(batch: Any, message: np.dtype[Any], name: str) -> None:
    try:
        _check_values(batch, message, lambda value: _refuse(batch, message, name, value))
    except RecursionError:
        raise InvalidValueError(f"{name} is nested too deep, or holds itself") from None


def _check_values(value: Any, dtype: np.dtype[Any], refuse: Callable[[Any], NoReturn]) -> None:
    """Look at every value of one message or many; arrays are what NumPy says they are."""
    if dtype.base.names is not None:
        _check_records(value, dtype.base, refuse)
    elif isinstance(value, tuple) or _is_list(value):
        for one in value:
            _check_values(one, dtype, refuse)
    elif isinstance(value, _NOT_A_NUMBER):
        if not _suits_text(value, dtype.base):
            refuse(value)
    elif isinstance(value, range):
        return  # of integers, which NumPy compares with what fits
    elif isinstance(value, np.ndarray) and value.ndim:
        if not np.can_cast(value.dtype, dtype.base, "same_kind"):
            refuse(value)
    elif dtype.base.kind in "iu":
        if not _suits_integer(value, dtype.base):
            refuse(value)
    elif dtype.base.kind in "SU" or (isinstance(value, np.ndarray) and value.dtype.kind in "SU"):
        refuse(value)


def _suits_text(value: Any, field: np.dtype[Any]) -> bool:
    """Whether text, bytes or None is what a field holds, and fits."""
    if value is None:
        return False
    if isinstance(value, str):
        return field.kind in "Mm" or (field.kind in "SU" and len(value) <= _length(field))
    return field.kind == "V" or (field.kind == "S" and len(value) <= field.itemsize)


def _length(field: np.dtype[Any]) -> int:
    return field.itemsize // (4 if field.kind == "U" else 1)


def _suits_integer(value: Any, field: np.dtype[Any]) -> bool:
    """Whether a number of any kind is an integer that a field can hold."""
    try:
        whole = int(value)
        limits = np.iinfo(field)
        return bool(whole == value) and limits.min <= whole <= limits.max
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        return False


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
    elif getattr(value, "dtype", None) != record:
        if len(names) > 1:  # which NumPy would put into every field
            refuse(value)
        _check_values(value, record[0], refuse)


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
