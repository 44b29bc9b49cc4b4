"""The structures that host, device and NumPy share, as NumPy sees them.

The C++ header ``layout/layout.hpp`` is the one source: the dtypes here are built from its tables
and checked against them, and device code is compiled from the same text
(:func:`header_source`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.resources import files
from typing import Any, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt

from ringmem.native import _native
from ringmem.native.aligned import aligned_zeros, bytes_of, integer, not_copied
from ringmem.native.errors import InvalidValueError

__all__ = ["ControlBlock", "TelemetryBuffer"]

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
        return self._load(instance._ptr + self._offset)

    def __set__(self, instance: _Structure, value: int) -> None:
        value = integer(self._name, value)
        if not self._low <= value < self._high:
            raise InvalidValueError(
                f"{self._name}={value} is not in {self._low} … {self._high - 1}"
            )
        self._store(instance._ptr + self._offset, value)


class _Structure:
    """A typed view of one structure in memory that somebody else may be writing."""

    # Without a dictionary: a mistyped field must not become an attribute that nobody sees.
    __slots__ = ("__weakref__", "_bytes", "_ptr")

    dtype: ClassVar[np.dtype[np.void]]
    alignment: ClassVar[int]

    def __init__(self, memory: Any = None) -> None:
        nbytes = self.dtype.itemsize
        raw = (
            aligned_zeros(nbytes, "u1", self.alignment)
            if memory is None
            else bytes_of(memory, nbytes, self.alignment)
        )
        self._bytes = raw
        self._ptr: int = raw.ctypes.data

    def __setattr__(self, name: str, value: object) -> None:
        try:
            super().__setattr__(name, value)
        except AttributeError:
            if hasattr(type(self), name):  # read-only, as `ptr` is
                raise
            raise self._no_field(name) from None

    def _no_field(self, name: str) -> AttributeError:
        import difflib  # only who mistypes pays for it

        names = self.dtype.names or ()
        near = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"
        text = f"{type(self).__name__} has no field {name}: {remedy}"
        return AttributeError(text, name=name, obj=self)

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
        ptr = integer("ptr", ptr)
        if not 0 < ptr < 1 << 64 or ptr % cls.alignment:
            raise InvalidValueError(
                f"ptr={ptr:#x} must be an address, a multiple of {cls.alignment} and not 0, for "
                f"{cls.__name__}"
            )
        raw = (ctypes.c_uint8 * cls.dtype.itemsize).from_address(ptr)
        raw._owner = owner  # type: ignore[attr-defined]
        return cls(raw)

    @property
    def ptr(self) -> int:
        """Address of the structure."""
        return self._ptr

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
        raise not_copied(self, "to_numpy()")


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

    __slots__ = ()

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

    __slots__ = ()

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
