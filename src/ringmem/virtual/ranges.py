"""Address ranges and mappings: the driver's own terms, owned and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringmem.buffers import DeviceBuffer
from ringmem.device import Device
from ringmem.native import _native
from ringmem.native.closing import Closing
from ringmem.native.errors import ClosedError, InvalidValueError
from ringmem.native.locks import Lock
from ringmem.virtual.locations import (
    Access,
    AccessMap,
    HostNode,
    access_name,
    checked_nbytes,
    plain_grants,
    plain_location,
    plain_work,
)
from ringmem.virtual.physical import PhysicalMemory
from ringmem.virtual.views import borrow

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["AddressRange", "MappedRange"]


class AddressRange(Closing):
    """Reserved addresses, with nothing behind them until memory is mapped.

    Made by :meth:`reserve`. The addresses are freed when the range is closed (or collected) and
    its last mapping is gone, in any order. Callable from any thread; nothing here waits for
    device work. For an example see :class:`PhysicalMemory`.
    """

    def __init__(self, core: _native.AddressRange, device: Device) -> None:
        if not isinstance(core, _native.AddressRange):
            raise InvalidValueError(f"core is {core!r}: use AddressRange.reserve(device, nbytes)")
        self._core = core
        self._device = device

    @classmethod
    def reserve(cls, device: Device | str | None, nbytes: int, alignment: int = 0) -> AddressRange:
        """Reserve addresses.

        Parameters
        ----------
        device : Device, str or None
            A device of the driver that will map; all its devices may be given access later.
        nbytes : int
            Bytes, rounded up to whole pages.
        alignment : int, optional
            A power of two, or 0 for the page size.

        Raises
        ------
        InvalidValueError
            `nbytes` is not positive or too large, or `alignment` is no power of two.
        NotSupportedError
            The device has no virtual memory management.
        OutOfMemoryError
            There are no such addresses left.
        """
        device = Device(device)
        nbytes = checked_nbytes(nbytes, 1, "nbytes")
        if alignment < 0:
            raise InvalidValueError(f"alignment is {alignment}: use 0 or a power of two")
        return cls(_native.AddressRange.reserve(device, nbytes, alignment), device)

    def map(
        self, physical: PhysicalMemory, offset: int = 0, access: AccessMap | None = None
    ) -> MappedRange:
        """Map all of a physical memory, and grant access to it.

        Parameters
        ----------
        physical : PhysicalMemory
            Of the same driver.
        offset : int, optional
            Bytes from the start of the range, a multiple of `granularity`.
        access : dict, optional
            Device, :class:`HostNode` or ``"host"`` → ``"none"``, ``"read"`` or ``"readwrite"``.
            By default the range's device reads and writes.

        Raises
        ------
        InvalidValueError
            `offset` is no multiple of the granularity, reaches beyond the range, or overlaps what
            is mapped.
        NotSupportedError
            A device cannot access the memory (no peer access).
        OutOfMemoryError
            The process has as many mappings as it may; see :func:`mapping_limit`.
        """
        if offset < 0:
            raise InvalidValueError(f"offset is {offset}: give 0 or more bytes")
        grants = plain_grants(access, self._device)
        return MappedRange(self._core.map(physical._core, offset, grants), self, physical)

    @property
    def device(self) -> Device:
        """Device: the one given to :meth:`reserve`."""
        return self._device

    @property
    def ptr(self) -> int:
        """int: the first address."""
        return self._core.ptr

    @property
    def nbytes(self) -> int:
        """int: bytes reserved, whole pages."""
        return self._core.nbytes

    @property
    def granularity(self) -> int:
        """int: the page size, in bytes."""
        return self._core.granularity

    @property
    def mappings(self) -> int:
        """int: live mappings in the range."""
        return self._core.mappings

    @property
    def closed(self) -> bool:
        """bool: closed; live mappings still use the addresses."""
        return self._core.closed

    def close(self) -> None:
        """Free the addresses, now or when the last mapping goes. Idempotent.

        Raises
        ------
        DriverError
            The driver failed to free them; a second call tries again.
        """
        self._core.close()

    def __repr__(self) -> str:
        try:
            at = f"at {self.ptr:#x}"
        except ClosedError:
            at = "closed"
        return f"<AddressRange {self.nbytes} bytes of {self._device.name}, {at}>"


class MappedRange:
    """Physical memory at an address. Made by :meth:`AddressRange.map`.

    It keeps its address range and its physical memory. When it is collected without
    :meth:`unmap`, it is unmapped at once: work that still uses it then fails, so call
    :meth:`unmap` with the streams that use it.
    """

    def __init__(
        self, core: _native.MappedRange, addresses: AddressRange, physical: PhysicalMemory
    ) -> None:
        if not isinstance(core, _native.MappedRange):
            raise InvalidValueError(f"core is {core!r}: use AddressRange.map(physical)")
        self._core = core
        self._range = addresses
        self._physical = physical
        self._lock = Lock()  # over what follows; the collector may come in between
        self._views = 0
        self._leaving = 0  # calls of unmap() under way

    def set_access(self, access: AccessMap) -> None:
        """Change who may access the memory here, in one driver call.

        Parameters
        ----------
        access : dict
            As for :meth:`AddressRange.map`; places that are not named keep what they have.

        Raises
        ------
        NotSupportedError
            A device cannot access the memory (no peer access).
        ClosedError
            It is unmapped.
        """
        self._core.set_access(plain_grants(access, self._range.device))

    def get_access(self, place: Device | HostNode | str) -> Access:
        """Return what a device, a node or ``"host"`` may do with the memory here."""
        location = plain_location(place, self._range.device)
        return access_name(self._core.get_access(location))

    def unmap(self, streams: object = None) -> None:
        """Wait for work, then unmap. Idempotent.

        Parameters
        ----------
        streams : stream-like, Event, or a list of them, optional
            What may use the memory: the host waits for the work submitted so far, with the GIL
            released, and for nothing else of the device. By default the thread's current stream
            of the device; ``[]`` waits for nothing.

        Raises
        ------
        InvalidValueError
            A view of it is alive.
        DriverError
            The driver failed; the memory is still mapped, and a second call tries again.
        """
        with self._lock:
            if self._views:
                raise InvalidValueError(
                    f"{self._views} views of the mapping are alive: drop them first"
                )
            self._leaving += 1
        try:
            if not self.closed:
                plain, events = plain_work(streams, self._range.device)
                self._core.unmap(plain, events)
        finally:
            with self._lock:
                self._leaving -= 1

    def view(
        self, shape: int | tuple[int, ...] | None = None, dtype: npt.DTypeLike = "uint8"
    ) -> DeviceBuffer:
        """Return the memory, or its beginning, as a buffer. The mapping stays as long as it lives.

        Parameters
        ----------
        shape : int or tuple of int, optional
            By default as many elements as fit.
        dtype : dtype, optional
            By default bytes.
        """
        return borrow(
            ptr=self.ptr,
            limit=self.nbytes,
            shape=shape,
            dtype=dtype,
            device=self._range.device,
            hold=_Hold(self),
        )

    @property
    def range(self) -> AddressRange:
        """AddressRange: where it is mapped."""
        return self._range

    @property
    def physical(self) -> PhysicalMemory:
        """PhysicalMemory: what is mapped."""
        return self._physical

    @property
    def ptr(self) -> int:
        """int: the first address."""
        return self._core.ptr

    @property
    def nbytes(self) -> int:
        """int: bytes mapped."""
        return self._core.nbytes

    @property
    def offset(self) -> int:
        """int: bytes from the start of the range."""
        return self._core.offset

    @property
    def closed(self) -> bool:
        """bool: it is unmapped."""
        return self._core.closed

    def __repr__(self) -> str:
        try:
            at = f"at {self.ptr:#x}"
        except ClosedError:
            at = "unmapped"
        return f"<MappedRange {self.nbytes} bytes of {self._range.device.name}, {at}>"


class _Hold:
    """One view of a mapping, for as long as this lives."""

    def __init__(self, mapping: MappedRange) -> None:
        self._mapping: Any = None
        with mapping._lock:
            mapping._core.ptr  # noqa: B018 - raises ClosedError
            if mapping._leaving:
                raise InvalidValueError(f"{mapping!r} is being unmapped: no view of it any more")
            mapping._views += 1
        self._mapping = mapping

    def __del__(self) -> None:
        if self._mapping is not None:
            with self._mapping._lock:
                self._mapping._views -= 1
