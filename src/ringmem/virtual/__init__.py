"""Floor 3: address ranges, physical memory, mappings, growable and sparse buffers, sharing."""

from __future__ import annotations

import atexit

from ringmem.native import _native
from ringmem.virtual.growable import GrowableBuffer
from ringmem.virtual.locations import HostNode
from ringmem.virtual.physical import PhysicalMemory, allocation_granularity
from ringmem.virtual.ranges import AddressRange, MappedRange
from ringmem.virtual.settings import (
    live_mappings,
    mapping_limit,
    recycle_limit,
    set_recycle_limit,
)
from ringmem.virtual.sharing import SharedBuffer, Ticket, attach
from ringmem.virtual.sparse import SparseBuffer

__all__ = [
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
]

# The mapping thread starts with the first work there is for it; joining one that never started
# costs nothing.
atexit.register(_native.finish_mapping_thread)
