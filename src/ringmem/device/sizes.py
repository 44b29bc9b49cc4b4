"""Sizes as people write them: ``"64 GiB"``, ``"1.5GB"``, ``4096``."""

from __future__ import annotations

import re
from fractions import Fraction

from ringmem.device.scalars import to_integer
from ringmem.native.errors import InvalidValueError

__all__ = ["format_nbytes", "parse_nbytes"]

_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(i?)(B?)\s*$", re.IGNORECASE | re.ASCII)
_MAX_NBYTES = (1 << 63) - 1


def parse_nbytes(size: int | str, argument: str = "size") -> int:
    """Convert a size to bytes.

    Parameters
    ----------
    size : int or str
        Bytes, or a number with a unit: ``B``, ``KiB`` … ``PiB`` (powers of 1024), ``KB`` … ``PB``
        (powers of 1000). ``K`` … ``P`` alone count as powers of 1024.
    argument : str, default "size"
        What the error message calls it.

    Returns
    -------
    int
        Bytes, not negative.

    Raises
    ------
    InvalidValueError
        It is no size, negative, not a whole number of bytes, or 2**63 and more.

    Examples
    --------
    >>> parse_nbytes("64 GiB") == 64 << 30
    True
    """
    nbytes = _from_text(size) if isinstance(size, str) else to_integer(size)
    if nbytes is None or not 0 <= nbytes <= _MAX_NBYTES:
        raise InvalidValueError(
            f"{argument} is {size!r}: give bytes as an integer, or a text such as '8 GiB'"
        )
    return nbytes


def _from_text(text: str) -> int | None:
    match = _SIZE.match(text)
    if match is None:
        return None
    number, prefix, binary, unit = match.groups()
    if binary and not prefix:
        return None
    base = 1000 if unit and not binary else 1024
    nbytes = Fraction(number) * base ** _PREFIXES[prefix.upper()]
    return int(nbytes) if nbytes.denominator == 1 else None


def format_nbytes(nbytes: int) -> str:
    """Write bytes with the largest binary unit that leaves at least 1.

    Examples
    --------
    >>> format_nbytes(3 << 29)
    '1.5 GiB'
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} PiB"
