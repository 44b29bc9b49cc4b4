"""Host memory on cache lines of its own: arrays that begin on one, elements that share none."""

from __future__ import annotations

import ctypes
import math
import operator
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ringmem.native import _native
from ringmem.native.errors import InvalidValueError, NotSupportedError

__all__ = ["CacheLineAligned", "aligned_empty", "aligned_zeros"]

CACHE_LINE_ALIGNED_NBYTES: int = _native.cache_line_aligned_nbytes


class Watched(Protocol):
    """Memory that threads, processes or devices watch where it is."""

    @property
    def ptr(self) -> int:
        """Its address."""


def aligned_empty(
    shape: int | tuple[int, ...],
    dtype: npt.DTypeLike,
    alignment: int = CACHE_LINE_ALIGNED_NBYTES,
) -> npt.NDArray[Any]:
    """Return an uninitialised host array whose first byte is at a multiple of `alignment`.

    Parameters
    ----------
    shape : int or tuple of int
        Elements in each dimension; 0 is allowed.
    dtype : dtype-like
        Any NumPy dtype without objects.
    alignment : int, default 128
        Bytes, a power of two.

    Raises
    ------
    InvalidValueError
        A bad shape, dtype or alignment; the dtype holds objects.

    Examples
    --------
    >>> aligned_empty((3, 5), "f4").ctypes.data % 128
    0
    """
    dims, element, nbytes = _native.array_spec(shape, dtype)
    alignment = integer("alignment", alignment)
    if alignment < 1 or alignment & (alignment - 1):
        raise InvalidValueError(f"alignment={alignment} must be a power of two of bytes")
    try:
        raw = np.empty(nbytes + alignment, dtype=np.uint8)
    except ValueError as error:  # NumPy's word for more bytes than an address can count
        raise InvalidValueError(f"shape={shape} is {nbytes} bytes: too many") from error
    start = -raw.ctypes.data % alignment
    return np.ndarray(dims, dtype=element, buffer=raw.data, offset=start)


def aligned_zeros(
    shape: int | tuple[int, ...],
    dtype: npt.DTypeLike,
    alignment: int = CACHE_LINE_ALIGNED_NBYTES,
) -> npt.NDArray[Any]:
    """Return what :func:`aligned_empty` does, with every byte 0."""
    array = aligned_empty(shape, dtype, alignment)
    ctypes.memset(array.ctypes.data, 0, array.nbytes)
    return array


class CacheLineAligned:
    """Values of any dtype, each on 128-byte lines of its own.

    Two threads, processes or devices that write different elements never write the same line.

    Parameters
    ----------
    dtype : dtype-like
        Any NumPy dtype without objects.
    shape : int or tuple of int, default ()
        Elements in each dimension.
    memory : object, optional
        A writable buffer to use instead of new zeroed memory; it must start at a multiple of 128
        bytes, be large enough, and stays alive as long as this object.

    Raises
    ------
    InvalidValueError
        A bad shape or dtype, or memory that is too small, read-only or not aligned.

    Examples
    --------
    >>> counters = CacheLineAligned("u8", 4)
    >>> counters.array[2] = 7
    >>> int(counters.array.sum()), counters.stride, counters.ptr % 128
    (7, 128, 0)
    """

    __slots__ = ("__weakref__", "_array", "_stride")

    alignment: ClassVar[int] = CACHE_LINE_ALIGNED_NBYTES

    def __init__(
        self,
        dtype: npt.DTypeLike,
        shape: int | tuple[int, ...] = (),
        *,
        memory: Any = None,
    ) -> None:
        dims, element, _ = _native.array_spec(shape, dtype)
        self._stride: int = -(-element.itemsize // self.alignment) * self.alignment
        lines = aligned_zeros((*dims, self.stride), "u1") if memory is None else None
        if lines is None:
            lines = bytes_of(memory, self.stride * math.prod(dims), self.alignment)
        strides: list[int] = []
        step = self.stride
        for dim in reversed(dims):
            strides.insert(0, step)
            step *= dim
        self._array: npt.NDArray[Any] = np.ndarray(
            dims, dtype=element, buffer=lines.reshape(-1).data, strides=tuple(strides)
        )

    @property
    def array(self) -> npt.NDArray[Any]:
        """The elements; C order over elements, the last stride is :attr:`stride` bytes."""
        return self._array

    @array.setter
    def array(self, value: npt.NDArray[Any]) -> None:
        if value is not self._array:  # which `counters.array += 1` gives back
            raise AttributeError("array cannot be replaced: assign to its elements, array[...] = …")

    @property
    def stride(self) -> int:
        """Bytes from one element to the next: the itemsize rounded up to 128."""
        return self._stride

    @property
    def ptr(self) -> int:
        """Address of the first element."""
        return self.array.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of memory, padding included."""
        return self.array.size * self.stride

    def __repr__(self) -> str:
        return f"CacheLineAligned({self.array.dtype}, shape={self.array.shape}, ptr={self.ptr:#x})"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise not_copied(self, "array.copy()")


def not_copied(memory: Watched, remedy: str) -> NotSupportedError:
    """Return the error for a copy of memory that others watch where it is."""
    return NotSupportedError(
        f"the {type(memory).__name__} at {memory.ptr:#x} cannot be pickled or copied: others watch "
        f"it where it is; take {remedy}"
    )


def integer(name: str, value: Any) -> int:
    """Return an integer, of Python or NumPy; InvalidValueError names the argument otherwise."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidValueError(f"{name}={value!r:.80} must be an integer") from None


def bytes_of(memory: Any, nbytes: int, alignment: int) -> npt.NDArray[np.uint8]:
    """Return the first `nbytes` of a writable, aligned buffer as bytes."""
    try:
        raw = np.frombuffer(memory, dtype=np.uint8)
    except (BufferError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"memory={memory!r:.80} must be a C-contiguous buffer that the host can access: {error}"
        ) from error
    if not raw.flags.writeable:
        raise InvalidValueError(f"memory={memory!r:.80} is read-only; pass writable memory")
    if raw.nbytes < nbytes:
        raise InvalidValueError(f"memory has {raw.nbytes} bytes; {nbytes} are needed")
    if raw.ctypes.data % alignment:
        raise InvalidValueError(
            f"memory starts at {raw.ctypes.data:#x}, which is no multiple of {alignment}; "
            "aligned_zeros() gives memory that is"
        )
    return raw[:nbytes]
