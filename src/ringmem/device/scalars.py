"""What counts as an integer or as a time: NumPy's scalars too, bools as neither."""

from __future__ import annotations

import operator

__all__ = ["is_bool", "to_integer", "to_seconds"]

_BOOLS = frozenset({"bool", "bool_"})  # of Python and of NumPy, which need not be imported


def is_bool(value: object) -> bool:
    """Whether it is a bool, of Python or of NumPy."""
    return type(value).__name__ in _BOOLS


def to_integer(value: object) -> int | None:
    """Return anything with ``__index__`` as an int; None for a bool and what is no integer.

    Examples
    --------
    >>> import numpy as np
    >>> to_integer(np.int64(8)), to_integer(True), to_integer(8.0)
    (8, None, None)
    """
    if is_bool(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def to_seconds(value: object) -> float | None:
    """Return any real number as a float; None for a bool, a text, nan and what is no number.

    Examples
    --------
    >>> to_seconds(1), to_seconds("1"), to_seconds(True)
    (1.0, None, None)
    """
    if is_bool(value) or isinstance(value, str | bytes | bytearray):
        return None
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return None if seconds != seconds else seconds
