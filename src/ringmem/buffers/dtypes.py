"""DLPack's type codes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ringmem.native.errors import InvalidValueError

__all__ = ["dlpack_code", "dtype_of_dlpack"]

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
