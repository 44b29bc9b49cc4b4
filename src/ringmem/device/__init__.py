"""Floor 1: devices, streams, events, memory visibility, peers, simulated devices."""

from __future__ import annotations

from ringmem.device.capabilities import Capabilities
from ringmem.device.device import Device, MemoryInfo, default_device, devices
from ringmem.device.event import Event
from ringmem.device.peer_copy import CopyRoute, PeerCopyResult, copy_peer
from ringmem.device.peers import (
    PeerMatrix,
    can_access_peer,
    disable_peer_access,
    enable_peer_access,
    peer_access_enabled,
    peer_matrix,
)
from ringmem.device.platforms import devices_of
from ringmem.device.simulation import Simulation, simulate
from ringmem.device.staging import release_staging
from ringmem.device.stream import Stream, as_stream, current_stream
from ringmem.device.visibility import MemoryVisibility, VisibilityDecision

__all__ = [
    "Capabilities",
    "CopyRoute",
    "Device",
    "Event",
    "MemoryInfo",
    "MemoryVisibility",
    "PeerCopyResult",
    "PeerMatrix",
    "Simulation",
    "Stream",
    "VisibilityDecision",
    "as_stream",
    "can_access_peer",
    "copy_peer",
    "current_stream",
    "default_device",
    "devices",
    "devices_of",
    "disable_peer_access",
    "enable_peer_access",
    "peer_access_enabled",
    "peer_matrix",
    "release_staging",
    "simulate",
]
