"""The structures that host, device and NumPy share, as NumPy sees them.

The C++ header ``layout/layout.hpp`` is the one source: the dtypes here are built from its tables
and checked against them, and device code is compiled from the same text
(:func:`header_source`).
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable
from importlib.resources import files
from typing import Any, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt

from ringmem.native import _native
from ringmem.native.errors import InvalidValueError, NotSupportedError

__all__ = [
    "CacheLineAligned",
    "ControlBlock",
    "TelemetryBuffer",
    "aligned_empty",
    "aligned_zeros",
]

CACHE_LINE_ALIGNED_NBYTES: int = _native.cache_line_aligned_nbytes

_TABLES: dict[str, Any] = _native.layout_tables()


def header_source() -> str:
    """Return the text of the layout header, to compile into device code.

    Examples
    --------
    >>> "struct alignas(128) ControlBlock" in header_source()
    True
    """
    return (files("ringmem.native") / "layout" / "layout.hpp").read_text(encoding="utf-8")


def dtype_of(structure: str) -> np.dtype[np.void]:
    """Return the NumPy dtype of a structure of the layout header.

    Parameters
    ----------
    structure : str
        Its C++ name, for instance ``"ControlBlock"``.

    Raises
    ------
    InvalidValueError
        There is no such structure.

    Examples
    --------
    >>> dtype_of("TelemetryBuffer").itemsize
    64
    """
    if structure not in _TABLES:
        raise InvalidValueError(f"structure={structure!r} is none of {', '.join(sorted(_TABLES))}")
    table = _TABLES[structure]
    fields: dict[str, tuple[int, int, str]] = table["fields"]
    return np.dtype(
        {
            "names": list(fields),
            "formats": [f"{kind}{nbytes}" for _, nbytes, kind in fields.values()],
            "offsets": [offset for offset, _, _ in fields.values()],
            "itemsize": table["nbytes"],
        }
    )


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
    alignment = _integer("alignment", alignment)
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

    Attributes
    ----------
    array : numpy.ndarray
        The elements; C order over elements, the last stride is :attr:`stride` bytes.
    stride : int
        Bytes from one element to the next: the itemsize rounded up to 128.

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

    alignment: ClassVar[int] = CACHE_LINE_ALIGNED_NBYTES

    def __init__(
        self,
        dtype: npt.DTypeLike,
        shape: int | tuple[int, ...] = (),
        *,
        memory: Any = None,
    ) -> None:
        dims, element, _ = _native.array_spec(shape, dtype)
        self.stride: int = -(-element.itemsize // self.alignment) * self.alignment
        lines = aligned_zeros((*dims, self.stride), "u1") if memory is None else None
        if lines is None:
            lines = _bytes_of(memory, self.stride * math.prod(dims), self.alignment)
        strides: list[int] = []
        step = self.stride
        for dim in reversed(dims):
            strides.insert(0, step)
            step *= dim
        self.array: npt.NDArray[Any] = np.ndarray(
            dims, dtype=element, buffer=lines.reshape(-1).data, strides=tuple(strides)
        )

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
        raise _not_copied(self, "array.copy()")


def _not_copied(memory: CacheLineAligned | _Structure, remedy: str) -> NotSupportedError:
    return NotSupportedError(
        f"the {type(memory).__name__} at {memory.ptr:#x} cannot be pickled or copied: others watch "
        f"it where it is; take {remedy}"
    )


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidValueError(f"{name}={value!r:.80} must be an integer") from None


def _bytes_of(memory: Any, nbytes: int, alignment: int) -> npt.NDArray[np.uint8]:
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


_LOAD: dict[str, Callable[[int], int]] = {
    "u4": _native.load_u32,
    "i4": _native.load_i32,
    "u8": _native.load_u64,
}
_STORE: dict[str, Callable[[int, int], None]] = {
    "u4": _native.store_u32,
    "i4": _native.store_i32,
    "u8": _native.store_u64,
}


class _Field:
    """One field of a shared structure: a single aligned load (acquire) or store (release)."""

    def __set_name__(self, owner: type[_Structure], name: str) -> None:
        self._name = name
        dtype, self._offset = cast(tuple[Any, int], owner.dtype.fields[name][:2])  # type: ignore[index]
        kind = dtype.str[1:]
        self._load, self._store = _LOAD[kind], _STORE[kind]
        bits = 8 * dtype.itemsize
        signed = dtype.kind == "i"
        self._low: int = -(1 << bits - 1) if signed else 0
        self._high: int = 1 << (bits - 1 if signed else bits)
        self.__doc__ = f"Field at offset {self._offset}, {dtype.name}."

    def __get__(self, instance: _Structure | None, owner: type[_Structure]) -> int:
        if instance is None:
            return cast(int, self)
        return self._load(instance.ptr + self._offset)

    def __set__(self, instance: _Structure, value: int) -> None:
        value = _integer(self._name, value)
        if not self._low <= value < self._high:
            raise InvalidValueError(
                f"{self._name}={value} is not in {self._low} … {self._high - 1}"
            )
        self._store(instance.ptr + self._offset, value)


class _Structure:
    """A typed view of one structure in memory that somebody else may be writing."""

    dtype: ClassVar[np.dtype[np.void]]
    alignment: ClassVar[int]

    def __init__(self, memory: Any = None) -> None:
        nbytes = self.dtype.itemsize
        raw = (
            aligned_zeros(nbytes, "u1", self.alignment)
            if memory is None
            else _bytes_of(memory, nbytes, self.alignment)
        )
        self._bytes = raw
        self.ptr: int = raw.ctypes.data

    @classmethod
    def from_address(cls, ptr: int, owner: object = None) -> Self:
        """View the structure at an address of host-accessible memory.

        Parameters
        ----------
        ptr : int
            Address, a multiple of :attr:`alignment`. Nothing checks that memory is there.
        owner : object, optional
            Kept alive as long as the view.

        Raises
        ------
        InvalidValueError
            `ptr` is no address, 0 or not aligned.
        """
        ptr = _integer("ptr", ptr)
        if not 0 < ptr < 1 << 64 or ptr % cls.alignment:
            raise InvalidValueError(
                f"ptr={ptr:#x} must be an address, a multiple of {cls.alignment} and not 0, for "
                f"{cls.__name__}"
            )
        raw = (ctypes.c_uint8 * cls.dtype.itemsize).from_address(ptr)
        raw._owner = owner  # type: ignore[attr-defined]
        return cls(raw)

    @property
    def nbytes(self) -> int:
        """Bytes of the structure."""
        return self.dtype.itemsize

    @property
    def record(self) -> npt.NDArray[np.void]:
        """The memory itself as a 0-dimensional record array: live, writable, field by field."""
        return self._bytes.view(self.dtype).reshape(())

    def to_numpy(self) -> npt.NDArray[np.void]:
        """Copy the structure as it is now into a 0-dimensional record array."""
        return self.record.copy()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={self.record[name][()]}" for name in self.dtype.names or ())
        return f"{type(self).__name__}({fields})"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise _not_copied(self, "to_numpy()")


class ControlBlock(_Structure):
    """How the host steers a ring kernel and sees where it stands (128 bytes, 128-aligned).

    Each attribute is one aligned load or store in memory that the kernel may be writing: reading
    one disturbs nothing. The layout header says which side writes which field.

    Parameters
    ----------
    memory : object, optional
        A writable buffer that starts at a multiple of 128 bytes; new zeroed memory by default.

    Examples
    --------
    >>> block = ControlBlock()
    >>> block.should_terminate = 1
    >>> int(block.record["should_terminate"]), block.nbytes, block.ptr % 128
    (1, 128, 0)
    """

    dtype = dtype_of("ControlBlock")
    alignment = _TABLES["ControlBlock"]["alignment"]

    active = _Field()
    should_terminate = _Field()
    has_terminated = _Field()
    error_count = _Field()
    messages_processed = _Field()
    last_activity = _Field()
    input_head_ptr = _Field()
    input_tail_ptr = _Field()
    input_buffer_ptr = _Field()
    input_capacity = _Field()
    input_message_nbytes = _Field()
    output_head_ptr = _Field()
    output_tail_ptr = _Field()
    output_buffer_ptr = _Field()
    output_capacity = _Field()
    output_message_nbytes = _Field()
    heartbeat = _Field()
    should_pause = _Field()
    is_paused = _Field()
    last_error = _Field()
    should_drain = _Field()
    heartbeat_timeout_ms = _Field()
    end_reason = _Field()


class TelemetryBuffer(_Structure):
    """What a ring kernel counted and timed (64 bytes, 64-aligned; times in ns).

    Parameters
    ----------
    memory : object, optional
        A writable buffer that starts at a multiple of 64 bytes; new zeroed memory by default.

    Examples
    --------
    >>> telemetry = TelemetryBuffer()
    >>> telemetry.processed, telemetry.latency_mean_ns, telemetry.nbytes
    (0, 0.0, 64)
    """

    dtype = dtype_of("TelemetryBuffer")
    alignment = _TABLES["TelemetryBuffer"]["alignment"]

    processed = _Field()
    dropped = _Field()
    latency_total_ns = _Field()
    latency_max_ns = _Field()
    latency_min_ns = _Field()
    queue_depth = _Field()
    last_error = _Field()
    last_processed_ns = _Field()
    sequence = _Field()

    @property
    def latency_mean_ns(self) -> float:
        """Mean latency over all messages so far; 0 before the first."""
        now = self.to_numpy()
        return float(now["latency_total_ns"]) / max(int(now["processed"]), 1)

    def to_numpy(self) -> npt.NDArray[np.void]:
        """Copy one moment of the block: retried while the kernel is writing.

        After 1000 tries in which the writer was always busy, the last copy is returned, whose
        fields may then belong to neighbouring messages.
        """
        for _ in range(1000):
            before = self.sequence
            copy = super().to_numpy()
            if before % 2 == 0 and self.sequence == before:
                break
        return copy
