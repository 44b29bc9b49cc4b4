"""Copies between devices: over the link where there is one, else pipelined through the host.

The plan (:func:`plan_copy`) is a pure value; :func:`copy_peer` acts on it. A staged copy goes
through two pinned chunks, so that one is filled while the other is emptied.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, overload

from ringmem.device.device import as_device
from ringmem.device.peers import can_access_peer
from ringmem.device.scalars import to_integer
from ringmem.device.sizes import format_nbytes
from ringmem.device.staging import CHUNK_NBYTES, Endpoint, staged_copy
from ringmem.device.stream import as_stream
from ringmem.native import _native
from ringmem.native.errors import InvalidDeviceError, InvalidValueError

if TYPE_CHECKING:
    from ringmem.device.device import Device
    from ringmem.device.stream import Stream

__all__ = ["CopyPlan", "CopyRoute", "PeerCopyResult", "copy_peer", "plan_copy"]

_MAX_ADDRESS = 1 << 64


class CopyRoute(Enum):
    """The way that a copy between devices takes."""

    LOCAL = "local"
    """Both ends are on one device."""

    PEER = "peer"
    """The driver copies over a direct link."""

    STAGED = "staged"
    """Through pinned host memory, in chunks; everything in stream order."""

    STAGED_BLOCKING = "staged, blocking"
    """The same between two drivers, which cannot wait for each other: the host waits."""


@dataclass(frozen=True)
class Chunks(Sequence[tuple[int, int]]):
    """The pieces of a range, each made when it is asked for.

    Attributes
    ----------
    nbytes : int
        Of the whole range, at least 1.
    chunk_nbytes : int
        Of each piece but the last.
    """

    nbytes: int
    chunk_nbytes: int

    def __len__(self) -> int:
        return -(-self.nbytes // self.chunk_nbytes)

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[int, int], ...]: ...

    def __getitem__(self, index: int | slice) -> tuple[int, int] | tuple[tuple[int, int], ...]:
        places = range(0, self.nbytes, self.chunk_nbytes)[index]
        return self._at(places) if isinstance(places, int) else tuple(map(self._at, places))

    def _at(self, offset: int) -> tuple[int, int]:
        return offset, min(self.chunk_nbytes, self.nbytes - offset)


@dataclass(frozen=True)
class CopyPlan:
    """How to copy, and why so.

    Attributes
    ----------
    route : CopyRoute
        The way.
    chunks : Chunks
        Offset and length in bytes of each piece; one piece unless staged.
    reason : str
        One sentence for people.
    """

    route: CopyRoute
    chunks: Chunks
    reason: str


@dataclass(frozen=True)
class PeerCopyResult:
    """What :func:`copy_peer` did.

    Attributes
    ----------
    nbytes : int
        Bytes copied.
    route : CopyRoute
        The way taken; ``staged`` says whether the host-staged fallback was used.
    chunks : int
        Pieces submitted.
    reason : str
        Why this way.
    """

    nbytes: int
    route: CopyRoute
    chunks: int
    reason: str

    @property
    def staged(self) -> bool:
        """bool: the data went through host memory."""
        return self.route in (CopyRoute.STAGED, CopyRoute.STAGED_BLOCKING)

    @property
    def blocked(self) -> bool:
        """bool: the copy was complete when the call returned."""
        return self.route is CopyRoute.STAGED_BLOCKING


def plan_copy(
    dst: str,
    src: str,
    nbytes: int,
    *,
    linked: bool,
    same_driver: bool,
    chunk_nbytes: int = CHUNK_NBYTES,
) -> CopyPlan:
    """Decide how to copy; pure.

    Parameters
    ----------
    dst, src : str
        Names of the devices.
    nbytes : int
        At least 1.
    linked : bool
        The devices can reach each other's memory directly.
    same_driver : bool
        They belong to one driver, so their streams can wait for each other.
    chunk_nbytes : int
        Size of a staging chunk.
    """
    whole = Chunks(nbytes, nbytes)
    if same_driver and dst == src:
        return CopyPlan(CopyRoute.LOCAL, whole, f"both ends are on {dst}")
    if same_driver and linked:
        return CopyPlan(CopyRoute.PEER, whole, f"{src} and {dst} have a direct link")
    chunks = Chunks(nbytes, chunk_nbytes)
    if same_driver:
        return CopyPlan(CopyRoute.STAGED, chunks, f"{src} and {dst} have no direct link")
    return CopyPlan(
        CopyRoute.STAGED_BLOCKING, chunks, f"{src} and {dst} belong to different drivers"
    )


def copy_peer(
    dst_ptr: int,
    dst_device: Device | str,
    src_ptr: int,
    src_device: Device | str,
    nbytes: int,
    stream: Stream | object | None = None,
) -> PeerCopyResult:
    """Copy memory from one device to another, in the order of a stream.

    Parameters
    ----------
    dst_ptr, src_ptr : int
        Addresses on their devices. The memory must stay valid until the copy is done.
    dst_device, src_device : Device or str
        Where the ends are; of any platform.
    nbytes : int
        How much; at least 1, and no more than device and host have memory together.
    stream : stream-like, optional
        A stream of either device; by default the current one of `dst_device`. Earlier work on it
        comes before the copy, later work after.

    Returns
    -------
    PeerCopyResult
        The way it took, and whether the host-staged fallback was used. Between different drivers
        the call returns when the copy is complete; otherwise it does not wait for it.

    Raises
    ------
    InvalidValueError
        A null address, no bytes, more than there can be, a range beyond the address space, what is
        no integer, or ranges that overlap.
    InvalidDeviceError
        There is no such device, or the stream belongs to neither.
    ClosedError
        The stream is closed.
    DriverError
        The driver failed; a part of the destination may have been written.

    Examples
    --------
    >>> import ringmem
    >>> with ringmem.simulate(devices=2, peers=False) as simulation:
    ...     a, b = simulation.devices
    ...     src = a.driver.mem_alloc(a.ordinal, 64)
    ...     dst = b.driver.mem_alloc(b.ordinal, 64)
    ...     result = ringmem.copy_peer(dst, b, src, a, 64)
    ...     b.default_stream.synchronize()
    >>> result.staged, result.reason
    (True, 'cpu:0 and cpu:1 have no direct link')
    """
    dst_device = as_device(dst_device, "dst_device")
    src_device = as_device(src_device, "src_device")
    nbytes = _size(nbytes, dst_device, src_device)
    dst_ptr = _address("dst_ptr", dst_ptr, nbytes)
    src_ptr = _address("src_ptr", src_ptr, nbytes)
    ordered_on = _stream_of_either(stream, dst_device, src_device)
    _check_apart(dst_ptr, src_ptr, nbytes)
    same_driver = dst_device.driver is src_device.driver
    plan = plan_copy(
        dst_device.name,
        src_device.name,
        nbytes,
        linked=can_access_peer(dst_device, src_device),
        same_driver=same_driver,
    )
    driver, dst, src = dst_device.driver, dst_device.ordinal, src_device.ordinal
    if plan.route is CopyRoute.LOCAL:
        driver.copy_async(dst, dst_ptr, src_ptr, nbytes, ordered_on.handle)
    elif plan.route is CopyRoute.PEER:
        driver.copy_peer_async(dst, dst_ptr, src, src_ptr, nbytes, ordered_on.handle)
    else:
        staged_copy(
            Endpoint(dst_device, dst_ptr),
            Endpoint(src_device, src_ptr),
            plan.chunks,
            ordered_on,
        )
    return PeerCopyResult(nbytes, plan.route, len(plan.chunks), plan.reason)


def _stream_of_either(stream: object | None, dst: Device, src: Device) -> Stream:
    if isinstance(stream, _native.StreamBase):
        if stream.device is src or stream.device is dst:
            return as_stream(stream, src if stream.device is src else dst)
        raise InvalidDeviceError(
            f"{stream!r} belongs to neither end of the copy: give a stream of "
            f"{_native.name_beside(dst, stream.device)} or "
            f"{_native.name_beside(src, stream.device)}"
        )
    try:
        return as_stream(stream, dst)
    except InvalidDeviceError:
        return as_stream(stream, src)


def _integer(argument: str, value: object) -> int:
    number = to_integer(value)
    if number is None:
        raise InvalidValueError(f"{argument} is {value!r}: give an integer")
    return number


def _size(value: object, dst: Device, src: Device) -> int:
    nbytes = _integer("nbytes", value)
    if nbytes < 1:
        raise InvalidValueError(f"nbytes is {nbytes}: copy at least one byte")
    for device in (dst, src):
        most = _most_nbytes(device)
        if nbytes > most:
            raise InvalidValueError(
                f"nbytes is {nbytes}: {device.name} and its host have {format_nbytes(most)} of "
                "memory together; give the bytes of the smaller range"
            )
    return nbytes


def _most_nbytes(device: Device) -> int:
    """Return what no valid range of the device exceeds; asked once.

    Its own memory, and that of the host, where pinned and managed memory may be.
    """
    known: int | None = device.__dict__.get("_most_nbytes")
    if known is None:
        known = device.memory_info().total + _host_nbytes()
        device.__dict__["_most_nbytes"] = known
    return known


def _host_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_apart(dst_ptr: int, src_ptr: int, nbytes: int) -> None:
    # Host and devices share one address space, so this holds whatever devices were named.
    if abs(dst_ptr - src_ptr) < nbytes:
        raise InvalidValueError(
            f"dst_ptr is {dst_ptr:#x} and src_ptr is {src_ptr:#x} with nbytes {nbytes}: the ranges "
            "overlap; give ranges that lie apart, or copy by way of other memory"
        )


def _address(argument: str, value: object, nbytes: int) -> int:
    ptr = _integer(argument, value)
    if ptr <= 0 or ptr + nbytes > _MAX_ADDRESS:
        raise InvalidValueError(
            f"{argument} is {ptr:#x} with nbytes {nbytes}: give an address whose range ends within "
            "64 bits"
        )
    return ptr
