"""Where memory lives, who may access it, and which streams use it, as the native floor takes them.

The native floor wants plain numbers; these functions check what users give and make them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ringmem.device import Device, Event, as_stream
from ringmem.native.errors import InvalidDeviceError, InvalidValueError

__all__ = ["Access", "HostNode"]

Access: TypeAlias = Literal["none", "read", "readwrite"]

# Values of native LocationKind and Access; the latter are CUmemAccess_flags.
_DEVICE, _HOST, _HOST_NUMA = 0, 1, 2
_ACCESS: dict[str, int] = {"none": 0, "read": 1, "readwrite": 3}
_ACCESS_NAMES: dict[int, Access] = {0: "none", 1: "read", 3: "readwrite"}

_LARGEST = 2**63 - 1  # bytes; beyond it the sum of an address and a size could overflow


@dataclass(frozen=True)
class HostNode:
    """A NUMA node of the host, as a place for physical memory that devices map.

    Parameters
    ----------
    node : int, optional
        The node's number, by default 0.
    device : Device or str, optional
        A device whose driver makes the memory, by default the default device.

    Examples
    --------
    >>> from ringmem.virtual import HostNode
    >>> HostNode(0, "cpu").node
    0
    """

    node: int = 0
    device: Device = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.node < 0:
            raise InvalidValueError(f"node is {self.node}: NUMA nodes are numbered from 0")
        object.__setattr__(self, "device", Device(self.device))


Location: TypeAlias = Device | HostNode | Literal["host"]
AccessMap: TypeAlias = Mapping[Device | HostNode | str, Access]
Streams: TypeAlias = "object | Iterable[object] | None"


def device_and_location(place: Device | HostNode | str | None) -> tuple[Device, tuple[int, int]]:
    """Return the device that names the driver, and the plain location."""
    if isinstance(place, HostNode):
        return place.device, (_HOST_NUMA, place.node)
    device = Device(place)
    return device, (_DEVICE, device.ordinal)


def plain_location(place: Device | HostNode | str, device: Device) -> tuple[int, int]:
    """Return the plain location of a place that must belong to the driver of `device`."""
    if isinstance(place, str) and place == "host":
        return (_HOST, 0)
    of, location = device_and_location(place)
    if of.driver is not device.driver:
        raise InvalidDeviceError(
            f"{of.name} and {device.name} have different drivers, such as a simulation's, and "
            f"cannot share memory: give a device of the driver of {device.name}"
        )
    return location


def plain_grants(access: AccessMap | None, device: Device) -> list[tuple[int, int, int]]:
    """Return an access map as plain grants; None means that `device` reads and writes."""
    if access is None:
        return [(_DEVICE, device.ordinal, _ACCESS["readwrite"])]
    grants = []
    for place, name in access.items():
        if name not in _ACCESS:
            raise InvalidValueError(f"access is {name!r}: use 'none', 'read' or 'readwrite'")
        grants.append((*plain_location(place, device), _ACCESS[name]))
    return grants


def access_name(value: int) -> Access:
    """Return the name of a native Access."""
    return _ACCESS_NAMES[value]


def plain_work(work: object, device: Device) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Split streams and events into plain streams and plain events.

    `work` is one stream-like or :class:`Event`, an iterable of them, or None for the thread's
    current stream of `device`. Streams of other devices of the same driver are taken as they are.
    """
    streams: list[tuple[int, int]] = []
    events: list[tuple[int, int]] = []
    items = list(work) if isinstance(work, list | tuple | set | frozenset) else [work]
    for item in items:
        if isinstance(item, Event):
            if item.recorded:
                events.append((item.device.ordinal, item.handle))
            continue
        of = getattr(item, "device", device)
        same_driver = isinstance(of, Device) and of.driver is device.driver
        stream = as_stream(item, of if same_driver else device)
        streams.append((stream.device.ordinal, stream.handle))
    return streams, events


def plain_streams(work: object, device: Device) -> list[tuple[int, int]]:
    """Return plain streams, where events cannot be taken."""
    streams, events = plain_work(work, device)
    if events:
        raise InvalidValueError("streams holds an Event: give the streams that use the memory")
    return streams


def checked_nbytes(size: int, itemsize: int, argument: str) -> int:
    """Return ``size * itemsize``, which must be positive and fit an address space."""
    nbytes = size * itemsize
    if not 0 < nbytes <= _LARGEST:
        raise InvalidValueError(
            f"{argument} asks for {nbytes} bytes: give between 1 byte and {_LARGEST}"
        )
    return nbytes
