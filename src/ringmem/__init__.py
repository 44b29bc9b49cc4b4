"""ringmem: GPU memory for Python.

Owned buffers, pools, virtual memory and host-GPU rings, which also run, whole, on a machine with no
GPU. This module only says where each name lives: a name is imported when it is first used, so that
importing the package loads nothing, calls no driver and starts no thread.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers and editors
    from ringmem.buffers import *  # noqa: F403
    from ringmem.device import *  # noqa: F403
    from ringmem.native.aligned import *  # noqa: F403
    from ringmem.native.errors import *  # noqa: F403
    from ringmem.native.layouts import *  # noqa: F403
    from ringmem.pool import *  # noqa: F403
    from ringmem.ring import *  # noqa: F403
    from ringmem.virtual import *  # noqa: F403

__version__ = "0.1.0"

# Module -> the public names it gives, which are its `__all__`. Each room adds its entry here and
# its import above.
_MODULES: dict[str, tuple[str, ...]] = {
    "ringmem.buffers": (
        "Buffer",
        "DeviceBuffer",
        "PinnedBuffer",
        "UnifiedBuffer",
        "as_buffer",
        "empty",
        "from_array",
        "from_dlpack",
        "full",
        "pin",
        "track_allocation_places",
        "zeros",
    ),
    "ringmem.device": (
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
    ),
    "ringmem.native.aligned": ("CacheLineAligned", "aligned_empty", "aligned_zeros"),
    "ringmem.native.errors": (
        "AllocationFailedError",
        "ClosedError",
        "CorruptedError",
        "DoubleFreeError",
        "DriverError",
        "HandlerError",
        "InvalidDeviceError",
        "InvalidValueError",
        "KernelFailedError",
        "NotInitializedError",
        "NotSupportedError",
        "OutOfMemoryError",
        "RingmemError",
        "TimeoutError",
    ),
    "ringmem.native.layouts": ("ControlBlock", "TelemetryBuffer"),
    "ringmem.pool": (
        "DebugReport",
        "DriverPoolStatistics",
        "HostPoolStatistics",
        "NativePool",
        "PinnedPool",
        "Pool",
        "PoolStatistics",
        "StatisticsRegion",
        "UnifiedPool",
    ),
    "ringmem.ring": (
        "Async",
        "BridgeCounters",
        "Consumer",
        "CudaSource",
        "DeviceRing",
        "DmaPolling",
        "KernelState",
        "LtoIr",
        "Mapped",
        "NativeHandler",
        "Producer",
        "Ring",
        "RingBufferBridge",
        "RingKernel",
        "Sync",
        "Telemetry",
        "Unified",
        "poll_interval_us",
        "set_poll_interval_us",
    ),
    "ringmem.virtual": (
        "AddressRange",
        "GrowableBuffer",
        "HostNode",
        "MappedRange",
        "PhysicalMemory",
        "SharedBuffer",
        "SparseBuffer",
        "Ticket",
        "allocation_granularity",
        "attach",
        "live_mappings",
        "mapping_limit",
        "recycle_limit",
        "set_recycle_limit",
    ),
}
_EXPORTS: dict[str, str] = {name: module for module, names in _MODULES.items() for name in names}

# Rooms that are used as modules, so that ``ringmem.residency.sleep()`` needs no import of its own.
_ROOMS = ("observe", "residency", "virtual")

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"ringmem.{name}")
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'ringmem' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # What a reader of the package may want: not what this file imports for itself.
    return sorted({name for name in globals() if name.startswith("__")} | {*_EXPORTS, *_ROOMS})
