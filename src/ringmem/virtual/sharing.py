"""Memory shared between processes: tickets, and what attaching with one gives."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ringmem.buffers import DeviceBuffer
from ringmem.device import Device, devices_of
from ringmem.device.scalars import to_seconds
from ringmem.native import _native
from ringmem.native.closing import Closing
from ringmem.native.errors import ClosedError, InvalidDeviceError, InvalidValueError
from ringmem.virtual.courier import Offer, courier, fetch
from ringmem.virtual.locations import plain_grants, plain_streams
from ringmem.virtual.views import borrow

__all__ = ["SharedBuffer", "Ticket", "attach"]

ShareAccess = Literal["read", "readwrite"]

_ENDLESS_S = 1e9  # 30 years; a socket refuses infinity


@dataclass(frozen=True)
class Ticket:
    """What another process of the same user needs to attach to memory of this one. Picklable.

    A ticket is for one piece of memory, as large as it was, with one kind of access, and for as
    many attachments as it was made for. It cannot be guessed: treat it as a key.

    Attributes
    ----------
    shape : tuple of int
        Of the shared array.
    dtype : dtype
        Of its elements.
    access : str
        ``"read"`` or ``"readwrite"``: the most that an attachment may have.
    device_uuid : str
        The device whose memory it is.
    handle_nbytes : tuple of int
        Sizes of the physical handles that make it up.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    access: ShareAccess
    device_uuid: str
    handle_nbytes: tuple[int, ...]
    address: str
    token: bytes = field(repr=False)
    owner_pid: int

    @property
    def nbytes(self) -> int:
        """int: bytes of the shared array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def revoke(self) -> bool:
        """Let nobody attach with it any more; those attached stay. In the owner's process.

        Returns
        -------
        bool
            It was valid until now.

        Raises
        ------
        InvalidValueError
            Another process made the ticket.
        """
        if os.getpid() != self.owner_pid:
            raise InvalidValueError(f"ticket was made by process {self.owner_pid}: revoke it there")
        return courier().retire(self.token, "its owner revoked it")


def make_ticket(
    owner: object,
    memories: Callable[[Any], list[_native.PhysicalMemory]],
    *,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: Device,
    access: ShareAccess,
    uses: int,
) -> Ticket:
    """Offer the memory of `owner`, which `memories` lists, and return the ticket for it."""
    if access not in ("read", "readwrite"):
        raise InvalidValueError(f"access is {access!r}: use 'read' or 'readwrite'")
    if uses < 1:
        raise InvalidValueError(f"uses is {uses}: at least one process must be able to attach")
    sizes = tuple(memory.nbytes for memory in memories(owner))
    if not sizes:
        raise InvalidValueError("the buffer is empty: there is nothing to share")
    # The offer keeps neither the buffer nor its memory: a ticket that nobody uses costs nothing.
    reference = weakref.ref(owner)

    def open_descriptors() -> list[int]:
        alive = reference()
        if alive is None:
            raise ClosedError("the buffer is gone")
        return _export(memories(alive), sizes)

    offer = Offer(open_descriptors, uses)
    post = courier()
    offer.finalizer = weakref.finalize(owner, post.retire, offer.token, "the buffer is gone")
    offer.finalizer.atexit = False
    post.offer(offer)
    return Ticket(shape, dtype, access, device.uuid, sizes, post.address, offer.token, os.getpid())


def _export(memories: list[_native.PhysicalMemory], sizes: tuple[int, ...]) -> list[int]:
    if tuple(memory.nbytes for memory in memories[: len(sizes)]) != sizes:
        raise ClosedError("the buffer shrank since the ticket was made")
    descriptors: list[int] = []
    try:
        for memory in memories[: len(sizes)]:
            descriptors.append(memory.export_fd())
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors


def attach(
    ticket: Ticket,
    device: Device | str | None = None,
    *,
    access: ShareAccess | None = None,
    timeout_s: float = 10.0,
) -> SharedBuffer:
    """Map the memory that a ticket is for. It is one memory: both processes see every write.

    The memory lives as long as anybody has it mapped, also when its owner ends. When work of one
    process is to be seen by the other, the first has to have finished it (synchronize) and say so.

    Parameters
    ----------
    ticket : Ticket
        From ``share()`` in another process of the same user (or in this one).
    device : Device or str, optional
        The device that gets access: the ticket's own by default, or a peer of it.
    access : str, optional
        ``"read"`` or ``"readwrite"``; by default what the ticket allows.
    timeout_s : float, optional
        Seconds to wait for the owner.

    Raises
    ------
    ClosedError
        The ticket is stale: used up, revoked, the buffer closed or shrunk, or its owner ended.
    InvalidValueError
        The ticket is forged or another user's, or does not allow this access.
    InvalidDeviceError
        The memory's device is not visible in this process.
    NotSupportedError
        `device` cannot access the memory (no peer access).
    TimeoutError
        The owner did not answer in time.
    """
    if not isinstance(ticket, Ticket):
        raise InvalidValueError(f"ticket is {ticket!r:.80}: give what share() returned")
    access = ticket.access if access is None else access
    if access not in ("read", "readwrite") or (access, ticket.access) == ("readwrite", "read"):
        raise InvalidValueError(f"access is {access!r}: the ticket allows {ticket.access!r}")
    limit_s = to_seconds(timeout_s)
    if limit_s is None or limit_s <= 0:
        raise InvalidValueError(f"timeout_s is {timeout_s!r}: give seconds, more than 0")
    home = _home_of(ticket, device)
    user = home if device is None else Device(device)
    descriptors = fetch(ticket.address, ticket.token, min(limit_s, _ENDLESS_S))
    try:
        if len(descriptors) != len(ticket.handle_nbytes):
            raise InvalidValueError(
                f"ticket is for {len(ticket.handle_nbytes)} handles, its owner has "
                f"{len(descriptors)}"
            )
        core = _native.Growable.attach(
            home,
            list(zip(descriptors, ticket.handle_nbytes, strict=True)),
            plain_grants({user: access}, home),
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return SharedBuffer(core, ticket, user, access)


def _home_of(ticket: Ticket, device: Device | str | None) -> Device:
    """Return this process's object for the device whose memory it is."""
    if device is not None:
        candidates = devices_of(Device(device).driver)
    else:
        from ringmem.device import devices

        candidates = list(devices())
    for candidate in candidates:
        if candidate.uuid == ticket.device_uuid:
            return candidate
    seen = ", ".join(candidate.name for candidate in candidates) or "none at all"
    if _native.forks():
        seen += (
            "; a child forked after its parent used a device does not see that one: start it with "
            "multiprocessing.get_context('spawn')"
        )
    raise InvalidDeviceError(
        f"the ticket's memory is on device {ticket.device_uuid}, which this process does not see; "
        f"it sees {seen}"
    )


class SharedBuffer(Closing):
    """Memory of another process, as large as it was when the ticket was made. From :func:`attach`.

    Examples
    --------
    >>> from ringmem.virtual import GrowableBuffer, attach
    >>> with GrowableBuffer(1 << 20, "uint8", "cpu", shape=1000) as mine:
    ...     ticket = mine.share(access="read")  # pickle it to another process
    ...     theirs = attach(ticket)
    ...     theirs.shape, theirs.access
    ((1000,), 'read')
    >>> theirs.close()  # it outlives its owner until then
    """

    def __init__(
        self, core: _native.Growable, ticket: Ticket, device: Device, access: ShareAccess
    ) -> None:
        self._core = core
        self._ticket = ticket
        self._device = device
        self._access = access

    def view(self) -> DeviceBuffer:
        """Return the array as a :class:`DeviceBuffer`; the memory stays mapped as long as it lives.

        With ``"read"`` access it is read-only.
        """
        return borrow(
            ptr=self._core.ptr,
            limit=self.nbytes,
            shape=self.shape,
            dtype=self.dtype,
            device=self._device,
            hold=_Pin(self),
            read_only=self._access == "read",
        )

    @property
    def device(self) -> Device:
        """Device: the one that has access."""
        return self._device

    @property
    def access(self) -> ShareAccess:
        """str: ``"read"`` or ``"readwrite"``."""
        return self._access

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the array."""
        return self._ticket.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype: of the elements."""
        return self._ticket.dtype

    @property
    def size(self) -> int:
        """int: elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """int: bytes of the array."""
        return self._ticket.nbytes

    @property
    def ptr(self) -> int:
        """int: the address in this process."""
        return self._core.ptr

    @property
    def closed(self) -> bool:
        """bool: it is detached."""
        return self._core.closed

    def close(self, streams: object = None) -> None:
        """Detach. Idempotent.

        Waits on the host for the work submitted so far to `streams` (by default the thread's
        current stream), with the GIL released.

        Raises
        ------
        InvalidValueError
            A view is alive; nothing has changed.
        DriverError
            The driver failed; unless `closed`, a second call tries again.
        """
        if not self.closed:
            self._core.close(plain_streams(streams, self._device))

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and not core.closed:
            core.abandon([(self._device.ordinal, 0)])

    def __repr__(self) -> str:
        state = "closed" if self.closed else self._access
        return f"<SharedBuffer {self.shape} {self.dtype} on {self._device.name}, {state}>"


class _Pin:
    """One view of a shared buffer, for as long as this lives."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self._buffer: SharedBuffer | None = None
        buffer._core.pin(buffer.nbytes)
        self._buffer = buffer

    def __del__(self) -> None:
        if self._buffer is not None:
            self._buffer._core.unpin(self._buffer.nbytes)
