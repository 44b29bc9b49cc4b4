"""Arguments that Python would let pass, and change in silence: flags and masked arrays."""

from __future__ import annotations

import sys

import numpy as np

from ringmem.native.errors import InvalidValueError

__all__ = ["flag", "optional_flag", "refuse_masked"]


def flag(argument: str, value: object) -> bool:
    """Return True or False, of Python or NumPy; refuse what is only like them."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise InvalidValueError(f"{argument} is {value!r:.80}: give True or False")


def optional_flag(argument: str, value: object) -> bool | None:
    """Return the same, or None."""
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    raise InvalidValueError(f"{argument} is {value!r:.80}: give True, False or None")


def refuse_masked(argument: str, value: object) -> None:
    """Refuse an array with masked elements: memory would have what is under the mask."""
    masked = sys.modules.get("numpy.ma")  # not imported before somebody needs it
    if masked is None or not isinstance(value, masked.MaskedArray):
        return
    mask = masked.flatten_mask(masked.getmaskarray(value))  # of fields too
    if count := np.count_nonzero(mask):
        raise InvalidValueError(
            f"{argument} has masked elements ({count} of {mask.size}), and a buffer has no mask: "
            f"give {argument}.filled()"
        )
