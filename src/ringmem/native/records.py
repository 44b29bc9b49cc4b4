"""Batches of messages as bytes, for native code: what fits as it is, what converts, what does not.

Called only when a batch is not already a contiguous array of exactly the message dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ringmem.native.errors import InvalidValueError

__all__ = ["as_bytes", "as_writable_bytes"]


def as_bytes(batch: Any, message: np.dtype[Any]) -> npt.NDArray[np.uint8]:
    """Return the messages of `batch` as contiguous bytes, copied if need be.

    Parameters
    ----------
    batch : array-like
        An array of the message dtype, one record, or what NumPy converts to that dtype (a tuple,
        a list of tuples, a number where there is one field). An array of another dtype is refused:
        converting one is a decision.
    message : numpy.dtype
        Of one message.

    Raises
    ------
    InvalidValueError
        The batch is of another dtype or cannot be converted.
    """
    if isinstance(batch, np.ndarray | np.generic) and not _same(batch.dtype, message):
        raise InvalidValueError(
            f"batch of dtype {batch.dtype} ({batch.dtype.itemsize} bytes) is not of the message "
            f"dtype {message} ({message.itemsize} bytes); convert it with astype()"
        )
    if batch is None:  # which NumPy would read as not-a-number
        raise InvalidValueError(f"batch=None is not of the message dtype {message}")
    if len(message.names or ()) > 1 and _is_bare(batch):  # NumPy would put it into every field
        raise InvalidValueError(
            f"batch={batch!r:.80} is not of the message dtype {message}: give a tuple, a value a "
            "field, for one message, or a list of tuples"
        )
    try:
        array = np.ascontiguousarray(batch, dtype=message)
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"batch={batch!r:.80} is not of the message dtype {message}: {error}"
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


def _is_bare(batch: Any) -> bool:
    while isinstance(batch, list) and batch:
        batch = batch[0]
    return isinstance(batch, int | float | complex | str | bytes)


def _same(left: np.dtype[Any], right: np.dtype[Any]) -> bool:
    return left == right and left.itemsize == right.itemsize
