"""Floor 2: owned buffers of device, pinned and managed memory, copies, interoperability."""

from __future__ import annotations

from ringmem.buffers.base import Buffer
from ringmem.buffers.copies import copy_general
from ringmem.buffers.create import (
    empty,
    from_array,
    full,
    track_allocation_places,
    zeros,
)
from ringmem.buffers.device_buffer import DeviceBuffer
from ringmem.buffers.interop import as_buffer, from_dlpack
from ringmem.buffers.pinned_buffer import PinnedBuffer, pin
from ringmem.buffers.unified_buffer import UnifiedBuffer
from ringmem.device import Device, default_device
from ringmem.native import _native

__all__ = [
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
]

_native.set_buffer_types(DeviceBuffer, PinnedBuffer, UnifiedBuffer, Device, default_device)
_native.set_copy_hook(copy_general)
_native.set_allocator_hook(_native.python_allocator)
if _native.environment_value("RINGMEM_TRACK_PLACES") not in (None, "", "0"):
    track_allocation_places()
