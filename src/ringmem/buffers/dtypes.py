"""Dtypes at the borders: DLPack's type codes, and one element as bytes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmem.native.errors import InvalidValueError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

__all__ = ["dlpack_code", "dtype_of_dlpack", "element_bytes"]

# DLDataTypeCode of DLPack 1.x.
_NUMPY_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_EXTENSION_CODES = {
    "bfloat16": 4,
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
_LARGEST_FLOAT_NBYTES = {"f": 8, "c": 16}


@functools.cache
def dlpack_code(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return DLPack's type code and bits.

    Raises
    ------
    InvalidValueError
        DLPack has no such type; the message says which view would do.
    """
    bits = dtype.itemsize * 8
    if dtype.name in _EXTENSION_CODES:
        return _EXTENSION_CODES[dtype.name], bits
    if dtype.kind in "mM":
        raise InvalidValueError(f"dtype is {dtype}: DLPack has no such type; use view('i8')")
    code = _NUMPY_CODES.get(dtype.kind)
    if code is None or dtype.names is not None:
        raise InvalidValueError(f"dtype is {dtype}: DLPack has no such type; use view('u1')")
    if not dtype.isnative:
        raise InvalidValueError(
            f"dtype is {dtype}: DLPack knows only this machine's byte order; use view('u1')"
        )
    if dtype.itemsize > _LARGEST_FLOAT_NBYTES.get(dtype.kind, dtype.itemsize):
        raise InvalidValueError(f"dtype is {dtype}: no device has such numbers; use view('u1')")
    return code, bits


def dtype_of_dlpack(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    """Return the NumPy dtype of a DLPack type.

    Raises
    ------
    InvalidValueError
        NumPy (with ml_dtypes) has no such type.
    """
    if lanes == 1 and bits % 8 == 0:
        for kind, known in _NUMPY_CODES.items():
            if known == code:
                try:
                    return np.dtype(bool if kind == "b" else f"{kind}{bits // 8}")
                except TypeError:
                    break
        for name, known in _EXTENSION_CODES.items():
            if known == code:
                return _extension_dtype(name)
    raise InvalidValueError(
        f"the tensor has DLPack type code {code}, {bits} bits, {lanes} lanes: ringmem reads whole "
        "bytes and one lane; convert it first"
    )


def _extension_dtype(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        raise InvalidValueError(f"the tensor is {name}: install ml_dtypes to read it") from None
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def element_bytes(value: object, dtype: DTypeLike) -> bytes:
    """Return one element as bytes.

    Raises
    ------
    InvalidValueError
        The dtype cannot hold the value exactly enough: it overflows, an integer is asked for and a
        fraction given, or a text is cut off.
    """
    element = np.empty((), dtype)
    try:
        if value is None:  # which NumPy would read as nan
            raise TypeError("give a value")
        with np.errstate(all="ignore"):
            element[()] = value
            same = _kept(element, value)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"value is {value!r}, which {element.dtype} cannot hold: {error}"
        ) from error
    if not same:
        raise InvalidValueError(
            f"value is {value!r}, which {element.dtype} cannot hold: it would become {element[()]}"
        )
    return element.tobytes()


def _kept(element: NDArray[Any], value: Any) -> bool:
    """Whether an element is the value that was assigned to it, but for rounding."""
    dtype = element.dtype
    if dtype.names is not None:
        parts = value.item() if isinstance(value, np.void | np.ndarray) else value
        if not isinstance(parts, tuple):  # one value for all fields
            parts = (parts,) * len(dtype.names)
        fields = zip(dtype.names, parts, strict=False)
        return all(_kept(np.asarray(element[name]), part) for name, part in fields)
    given = np.asarray(value)
    if dtype.kind in "iuSU":
        return bool(np.all(element == given))
    if dtype.kind in "fc" or (dtype.kind == "V" and given.dtype.kind in "iuf"):  # V: ml_dtypes
        found = element.astype(np.complex128)
        return bool(np.all(np.isfinite(found) | ~np.isfinite(given.astype(np.complex128))))
    return True
