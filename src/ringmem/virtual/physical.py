"""Physical memory: the driver's handles, owned and checked."""

from __future__ import annotations

import numpy as np

from ringmem.device import Device
from ringmem.native import _native
from ringmem.native.closing import Closing
from ringmem.native.errors import InvalidValueError, NotSupportedError
from ringmem.virtual.locations import HostNode, checked_nbytes, device_and_location
from ringmem.virtual.sharing import ShareAccess, Ticket, make_ticket

__all__ = ["PhysicalMemory", "allocation_granularity"]


def allocation_granularity(
    place: Device | HostNode | str | None = None, recommended: bool = False
) -> int:
    """Return the page size of virtual memory, in bytes.

    Parameters
    ----------
    place : Device, HostNode or str, optional
        Where the memory would live; by default the default device.
    recommended : bool, optional
        The size that maps fastest, instead of the smallest.

    Raises
    ------
    NotSupportedError
        The device has no virtual memory management.

    Examples
    --------
    >>> from ringmem.virtual import allocation_granularity
    >>> allocation_granularity("cpu") % 4096
    0
    """
    device, location = device_and_location(place)
    return _native.allocation_granularity(device, location, recommended)


class PhysicalMemory(Closing):
    """Physical memory that may be mapped, several times and for several devices.

    Made by :meth:`create` or :meth:`import_fd`. It is released when it is closed (or collected)
    and its last mapping is gone, in any order. Callable from any thread; nothing here waits for
    device work.

    Examples
    --------
    >>> from ringmem.virtual import AddressRange, PhysicalMemory
    >>> memory = PhysicalMemory.create("cpu", 1)
    >>> with AddressRange.reserve("cpu", 2 * memory.nbytes) as addresses:
    ...     first = addresses.map(memory)
    ...     second = addresses.map(memory, offset=memory.nbytes, access={"cpu": "read"})
    >>> memory.close()
    >>> first.unmap(), second.unmap()
    (None, None)
    """

    def __init__(self, core: _native.PhysicalMemory, device: Device) -> None:
        if not isinstance(core, _native.PhysicalMemory):
            raise InvalidValueError(
                f"core is {core!r}: use PhysicalMemory.create(device, nbytes), or import_fd()"
            )
        self._core = core
        self._device = device

    @classmethod
    def create(
        cls,
        place: Device | HostNode | str | None,
        nbytes: int,
        *,
        shareable: bool = True,
        rdma: bool = False,
    ) -> PhysicalMemory:
        """Create physical memory on a device or a NUMA node of the host.

        Parameters
        ----------
        place : Device, HostNode, str or None
            Where it lives; None is the default device.
        nbytes : int
            Bytes, rounded up to whole pages: `nbytes` of the result says how many there are.
        shareable : bool, optional
            It can be exported as a file descriptor. Cannot be changed later.
        rdma : bool, optional
            It can be used for GPUDirect RDMA. Cannot be changed later.

        Raises
        ------
        InvalidValueError
            `nbytes` is not positive, or too large to be an amount of memory.
        NotSupportedError
            The device has no virtual memory management, or cannot do what was asked for.
        OutOfMemoryError
            The device has not that much.
        """
        device, location = device_and_location(place)
        nbytes = checked_nbytes(nbytes, 1, "nbytes")
        core = _native.PhysicalMemory.create(device, nbytes, location, shareable, rdma)
        return cls(core, device)

    @classmethod
    def import_fd(
        cls, fd: int, nbytes: int, place: Device | HostNode | str | None = None
    ) -> PhysicalMemory:
        """Take a share in memory that another process, or this one, exported.

        Parameters
        ----------
        fd : int
            What :meth:`export_fd` gave, or a copy that came over a Unix socket. It stays the
            caller's: close it when you like, the memory lives on.
        nbytes : int
            The exact size of the memory (`nbytes` of the exporting object).
        place : Device, HostNode, str or None, optional
            Where the memory lives.

        Raises
        ------
        InvalidValueError
            `fd` is no descriptor, or `nbytes` is no multiple of the granularity.
        DriverError
            The descriptor is not one of exported memory.
        """
        device, location = device_and_location(place)
        nbytes = checked_nbytes(nbytes, 1, "nbytes")
        return cls(_native.PhysicalMemory.import_fd(device, fd, nbytes, location), device)

    def export_fd(self) -> int:
        """Return a new file descriptor of the memory; it is the caller's to close.

        Every descriptor, in whatever process it ends up, keeps the memory alive.

        Raises
        ------
        NotSupportedError
            It was created with ``shareable=False``.
        ClosedError
            The memory is closed.
        """
        return self._core.export_fd()

    def share(self, access: ShareAccess = "readwrite", uses: int = 1) -> Ticket:
        """Return a ticket with which other processes of the same user attach to the memory.

        The ticket does not keep the memory; attachments do.

        Parameters
        ----------
        access : str, optional
            ``"readwrite"`` or ``"read"``: the most that attachments may have.
        uses : int, optional
            How many may attach with it.

        Raises
        ------
        InvalidValueError
            An argument is wrong.
        NotSupportedError
            It was created with ``shareable=False``.
        """
        if not self.shareable:
            raise NotSupportedError("the memory was created with shareable=False")
        return make_ticket(
            self,
            _itself,
            shape=(self.nbytes,),
            dtype=np.dtype(np.uint8),
            device=self._device,
            access=access,
            uses=uses,
        )

    @property
    def device(self) -> Device:
        """Device: the one whose driver made the memory."""
        return self._device

    @property
    def handle(self) -> int:
        """int: the driver's handle; valid until the memory is released."""
        return self._core.handle

    @property
    def nbytes(self) -> int:
        """int: bytes, whole pages."""
        return self._core.nbytes

    @property
    def shareable(self) -> bool:
        """bool: it can be exported."""
        return self._core.shareable

    @property
    def mappings(self) -> int:
        """int: live mappings of the memory in this process."""
        return self._core.mappings

    @property
    def closed(self) -> bool:
        """bool: closed; live mappings still use the memory."""
        return self._core.closed

    def close(self) -> None:
        """Release the memory, now or when its last mapping goes. Idempotent.

        Raises
        ------
        DriverError
            The driver failed to release it; a second call tries again.
        """
        self._core.close()

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"<PhysicalMemory {self.nbytes} bytes of {self._device.name}{closed}>"


def _itself(memory: PhysicalMemory) -> list[_native.PhysicalMemory]:
    return [memory._core]
