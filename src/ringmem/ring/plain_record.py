"""A record as a handler in plain Python sees it: its fields are its only attributes.

NumPy's own record has attributes of an array beside them, which hide fields such as ``size`` or
``nbytes``; in a compiled handler nothing hides a field.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

__all__ = ["PlainRecord"]


class PlainRecord:
    """Fields of one record by attribute or by index, in place.

    Parameters
    ----------
    array : ndarray, shape ()
        Structured. Nested records are PlainRecords, fields that are arrays are arrays.

    Examples
    --------
    >>> import numpy as np
    >>> array = np.zeros((), [("size", "i8")])
    >>> record = PlainRecord(array)
    >>> record.size += 3
    >>> record.size, array["size"]
    (np.int64(3), array(3))
    """

    __slots__ = ("_array",)

    def __init__(self, array: npt.NDArray[Any]) -> None:
        object.__setattr__(self, "_array", array)

    def __getitem__(self, field: str) -> Any:
        part = self._array[field]
        return PlainRecord(part) if part.dtype.names and part.ndim == 0 else part[()]

    def __setitem__(self, field: str, value: Any) -> None:
        self._array[field] = value._array if isinstance(value, PlainRecord) else value

    def __getattr__(self, field: str) -> Any:
        try:
            return self[field]
        except ValueError as error:
            raise AttributeError(str(error)) from None

    def __setattr__(self, field: str, value: Any) -> None:
        try:
            self[field] = value
        except ValueError:
            if field in (self._array.dtype.names or ()):
                raise
            raise AttributeError(f"no field of name {field}") from None

    def __repr__(self) -> str:
        return repr(self._array[()])
