"""One element as bytes, for a fill: what the dtype holds but for rounding, and nothing else.

NumPy's assignment also cuts, wraps and parses; here every leaf of the element is compared with what
was given.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmem.buffers.arguments import refuse_masked
from ringmem.native.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike, NDArray

__all__ = ["element_bytes"]

# Of 8 bytes at most: what these hold, Python's int and float hold exactly.
_NUMBERS = frozenset("bBhHiIlLqQefd")
# Types of ml_dtypes without infinity: from here on finite values are cut to the largest one.
_SATURATES_AT = {"float4_e2m1fn": 7.0, "float6_e2m3fn": 7.75, "float6_e3m2fn": 30.0}


def element_bytes(value: object, dtype: DTypeLike) -> bytes:
    """Return one element as bytes.

    Raises
    ------
    InvalidValueError
        The dtype cannot hold the value exactly enough: it overflows, an integer is asked for and a
        fraction given, a text or a time is cut off, or it is of another sort (text for a number).
    """
    element = np.zeros((), dtype)  # also what no field covers
    try:
        with np.errstate(all="ignore"):
            _assign(element, value)
    except (BufferError, OverflowError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"value is {value!r:.80}, which {element.dtype} cannot hold: {error}"
        ) from error
    return element.tobytes()


def _assign(element: NDArray[Any], value: Any) -> None:
    """Set an element, or the array in a field, and compare; whatever differs is a ValueError."""
    if type(value) in (int, float) and element.dtype.char in _NUMBERS and not element.ndim:
        _assign_number(element, value)
        return
    if value is None:  # which NumPy would read as nan
        raise TypeError("give a value")
    refuse_masked("value", value)
    dtype = element.dtype
    if dtype.names is not None:
        _each(element, value, _assign_fields)
        return
    if dtype.type is np.void:
        _each(element, value, _assign_raw)
        return
    given = np.asarray(value)
    if given.ndim > element.ndim:
        raise ValueError(f"give one value, not an array {given.shape}")
    kept = _comparison(dtype, given.dtype)
    element[()] = value if given.dtype.kind == "O" else given
    if not kept(element, given):
        raise ValueError(f"it would become {element}")


def _assign_number(element: NDArray[Any], value: float) -> None:
    """Set one of NumPy's common numbers to one of Python's, in a third of the time."""
    element[()] = value
    found = element.item()
    if found == value or value != value:
        return
    if isinstance(found, int) or not math.isfinite(found):
        raise ValueError(f"it would become {found}")


def _each(element: NDArray[Any], value: Any, assign: Callable[[NDArray[Any], Any], None]) -> None:
    """Assign to every element of the array in a field; one value is meant for all of them."""
    if not element.ndim:
        assign(element, value)
        return
    several = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim)
    if isinstance(value, tuple) and element.dtype.names is not None:
        several = bool(value) and isinstance(value[0], tuple | np.void)
    if several and len(value) != len(element):
        raise ValueError(f"{len(value)} values were given for {len(element)}")
    for i in range(len(element)):
        _each(element[i, ...], value[i] if several else value, assign)


def _assign_fields(element: NDArray[Any], value: Any) -> None:
    names = element.dtype.names or ()
    if isinstance(value, np.void | np.ndarray) and value.dtype.names is not None:
        if value.shape:
            raise ValueError(f"give one value, not an array {value.shape}")
        value = tuple(value[name] for name in value.dtype.names)
    parts = value if isinstance(value, tuple) else (value,) * len(names)
    if len(parts) != len(names):
        raise ValueError(f"{len(parts)} values were given for {len(names)} fields")
    for name, part in zip(names, parts, strict=True):
        _assign(element[name], part)


def _assign_raw(element: NDArray[Any], value: Any) -> None:
    """Set raw bytes; what is shorter ends in zeros, as NumPy has it."""
    raw = memoryview(value).tobytes()  # bytes() of a NumPy integer is that many zeros
    if len(raw) > element.dtype.itemsize:
        raise ValueError(f"it has {len(raw)} bytes")
    element[()] = raw


# --- whether an element is what was assigned to it -----------------------------------------------


def _comparison(
    dtype: np.dtype[Any], given: np.dtype[Any]
) -> Callable[[NDArray[Any], NDArray[Any]], bool]:
    """Choose how values of one dtype are compared with what was given for them; pure."""
    kind = _kind(dtype)
    if kind in "SU":
        return _same
    if kind in "mM":
        return _same_time
    if kind == "c" or _kind(given) in "biufO":
        if kind == "b":
            return _same_bool
        if kind in "iu":
            return _same_integer
        if kind in "fc" and _kind(given) in "biufcO":
            return _rounded
    raise TypeError(f"it is {given}")


def _kind(dtype: np.dtype[Any]) -> str:
    """Return NumPy's letter, also for the numbers of ml_dtypes, most of which NumPy has as void."""
    if not _is_extension(dtype):
        return dtype.kind
    name = dtype.name
    return name[0] if name.startswith(("int", "uint")) else "c" if "complex" in name else "f"


def _is_extension(dtype: np.dtype[Any]) -> bool:
    return dtype.isbuiltin == 2


def _same(element: NDArray[Any], given: NDArray[Any]) -> bool:
    if element.dtype.kind in "SU" and given.dtype.kind in "SU":  # ASCII text is bytes and text
        given = given.astype(element.dtype.kind)
    return bool(np.all(element == given))


def _same_bool(element: NDArray[Any], given: NDArray[Any]) -> bool:
    return _kind(given.dtype) in "biu" and _same(element, given)


def _same_integer(element: NDArray[Any], given: NDArray[Any]) -> bool:
    if given.dtype.kind == "O" and hasattr(given[()], "__index__"):  # no number that compares
        given = np.asarray(operator.index(given[()]), object)
    return _same(_plain(element), _plain(given))


def _same_time(element: NDArray[Any], given: NDArray[Any]) -> bool:
    """Whether the way back to the unit that was given is exact."""
    if given.dtype.kind in "iu":  # a count of the element's unit
        return _same(element.astype("i8"), given)
    if given.dtype.kind not in "mMOU":
        raise TypeError(f"it is {given.dtype}")
    exact = given.astype(f"{element.dtype.kind}8")  # in its own unit, also of datetime and of text
    if np.datetime_data(exact.dtype)[0] == "generic":
        return _same(element.astype("i8"), exact.astype("i8"))
    return bool(
        np.all((element.astype(exact.dtype) == exact) | (np.isnat(element) & np.isnat(exact)))
    )


def _rounded(element: NDArray[Any], given: NDArray[Any]) -> bool:
    """Whether only digits were lost: what was finite is, and what was not is the same."""
    found, wanted = _plain(element), _plain(given)
    if found.dtype.kind == "c":
        return _rounded(found.real, wanted.real) and _rounded(found.imag, wanted.imag)
    special = (found == wanted) | ((found != found) & (wanted != wanted))
    if given.dtype.kind == "O":
        return bool(np.all(np.isfinite(found) | special))
    limit = _SATURATES_AT.get(element.dtype.name, np.inf)
    fits = np.isfinite(found) & np.isfinite(wanted) & (np.abs(wanted) <= limit)
    return bool(np.all(fits | special))


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return numbers of ml_dtypes as NumPy's, which have room for all of them."""
    if not _is_extension(array.dtype):
        return array
    return array.astype({"f": "f8", "c": "c8"}.get(_kind(array.dtype), "i8"))
