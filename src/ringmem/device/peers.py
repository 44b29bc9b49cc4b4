"""Peers: which devices reach each other's memory, switching that on, and the matrix of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringmem.device.device import Device, as_device
from ringmem.device.device import devices as all_devices
from ringmem.native import _native
from ringmem.native.errors import DriverError, InvalidValueError, NotSupportedError
from ringmem.native.locks import Lock

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "PeerMatrix",
    "can_access_peer",
    "disable_peer_access",
    "enable_peer_access",
    "peer_access_enabled",
    "peer_matrix",
]

_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
_NOT_ENABLED = 705  # CUDA_ERROR_PEER_ACCESS_NOT_ENABLED

_lock = Lock()  # guards the sets of enabled peers; never held around a driver call


@dataclass(frozen=True)
class PeerMatrix:
    """Who reaches whose memory.

    Attributes
    ----------
    devices : tuple of Device
        The order of rows and columns.
    can_access : tuple of tuple of bool
        ``can_access[i][j]``: device i is able to reach the memory of device j. True on the
        diagonal.
    enabled : tuple of tuple of bool
        The same for what :func:`enable_peer_access` switched on.
    """

    devices: tuple[Device, ...]
    can_access: tuple[tuple[bool, ...], ...]
    enabled: tuple[tuple[bool, ...], ...]


def can_access_peer(device: Device | str, peer: Device | str) -> bool:
    """Return whether `device` is able to reach the memory of `peer` over a direct link.

    Devices of different drivers never are; a device always reaches its own. Here and below, a
    name means what it means to :class:`Device`.
    """
    device, peer = as_device(device), as_device(peer, "peer")
    if device is peer:
        return True
    if device.driver is not peer.driver:
        return False
    return device.driver.peer_can_access(device.ordinal, peer.ordinal)


def peer_access_enabled(device: Device | str, peer: Device | str) -> bool:
    """Return whether :func:`enable_peer_access` is in force for the pair."""
    device, peer = as_device(device), as_device(peer, "peer")
    if device is peer or device.driver is not peer.driver:
        return device is peer
    with _lock:
        return peer.ordinal in _enabled(device)


def peer_matrix(devices: Iterable[Device | str] | None = None) -> PeerMatrix:
    """Return who reaches whose memory.

    Parameters
    ----------
    devices : iterable of Device or str, optional
        By default all devices of the machine.

    Raises
    ------
    InvalidValueError
        `devices` is no iterable, or holds what names no device.

    Examples
    --------
    >>> import ringmem
    >>> with ringmem.simulate(devices=2, peers=False) as simulation:
    ...     ringmem.peer_matrix(simulation.devices).can_access
    ((True, False), (False, True))
    """
    if devices is None:
        devices = all_devices()
    elif isinstance(devices, str | Device) or not hasattr(devices, "__iter__"):
        raise InvalidValueError(f"devices is {devices!r}: give a list of devices or of their names")
    rows = tuple(as_device(entry, f"devices[{i}]") for i, entry in enumerate(devices))
    return PeerMatrix(
        devices=rows,
        can_access=tuple(tuple(can_access_peer(a, b) for b in rows) for a in rows),
        enabled=tuple(tuple(peer_access_enabled(a, b) for b in rows) for a in rows),
    )


def enable_peer_access(device: Device | str, peer: Device | str) -> None:
    """Let `device` reach the memory of `peer`: what plain allocation gave, and its own pool.

    One direction. Idempotent and not counted: enabling twice needs one
    :func:`disable_peer_access`. It holds for the whole process. Mapped virtual memory has access
    rights of its own and is not concerned.

    Raises
    ------
    NotSupportedError
        There is no link, as between devices of different drivers. Copies work all the same:
        :func:`copy_peer` stages them through the host.
    InvalidValueError
        Both are the same device.
    DriverError
        The driver failed; access is as it was.
    """
    device, peer = _pair(device, peer)
    if peer_access_enabled(device, peer):
        return
    if not can_access_peer(device, peer):
        raise NotSupportedError(
            f"{device.name} cannot reach the memory of {peer.name}: there is no direct link; "
            "copy_peer() copies between them through the host"
        )
    by_us = _switch_on(device, peer)
    try:
        _grant_pool(device, peer, _native.Access.readwrite)
    except BaseException:
        if by_us:
            device.driver.peer_disable(device.ordinal, peer.ordinal)
        raise
    with _lock:
        _enabled(device).add(peer.ordinal)


def disable_peer_access(device: Device | str, peer: Device | str) -> None:
    """Take back :func:`enable_peer_access`. Idempotent. No work may be using the access.

    Raises
    ------
    NotSupportedError
        The devices belong to different drivers, so there is nothing to take back.
    InvalidValueError
        Both are the same device.
    DriverError
        The driver failed; access is as it was.
    """
    device, peer = _pair(device, peer)
    if not peer_access_enabled(device, peer):
        return
    _grant_pool(device, peer, _native.Access.none)
    try:
        device.driver.peer_disable(device.ordinal, peer.ordinal)
    except DriverError as error:
        if error.code != _NOT_ENABLED:  # somebody else switched it off: what was wanted
            _grant_pool(device, peer, _native.Access.readwrite)
            raise
    with _lock:
        _enabled(device).discard(peer.ordinal)


def _enabled(device: Device) -> set[int]:
    """Return the ordinals that the device was let reach. Call with the lock."""
    enabled: set[int] = device.__dict__.setdefault("_enabled_peers", set())
    return enabled


def _pair(device: Device | str, peer: Device | str) -> tuple[Device, Device]:
    """Return two devices of one driver."""
    first, second = as_device(device), as_device(peer, "peer")
    if first is second:
        raise InvalidValueError(
            f"peer is {second.name}, the device itself: it always reaches its own memory"
        )
    if first.driver is not second.driver:
        raise NotSupportedError(
            f"{first.name} cannot reach the memory of {second.name}: they belong to different "
            "drivers (such as a simulation's), so there is no direct link; copy_peer() copies "
            "between them through the host"
        )
    return first, second


def _switch_on(device: Device, peer: Device) -> bool:
    """Enable, and return whether it was us: a framework in the process may have been first."""
    try:
        device.driver.peer_enable(device.ordinal, peer.ordinal)
    except DriverError as error:
        if error.code == _ALREADY_ENABLED:
            return False
        raise
    return True


def _grant_pool(device: Device, peer: Device, access: _native.Access) -> None:
    """Say what `device` may do with memory from the pool of `peer`."""
    allocator = peer.allocator
    if isinstance(allocator, _native.StreamOrderedAllocator):
        location = _native.Location(_native.LocationKind.device, device.ordinal)
        peer.driver.pool_set_access(peer.ordinal, allocator.pool, [(location, access)])
