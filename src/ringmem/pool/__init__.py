"""Floor 4: pools of device, pinned, unified and driver memory."""

import ringmem.buffers  # noqa: F401 - its classes are what empty() makes
from ringmem.pool.driver_pool import DriverPoolStatistics, NativePool
from ringmem.pool.host_pools import HostPoolStatistics, PinnedPool, UnifiedPool
from ringmem.pool.pool import DebugReport, Pool
from ringmem.pool.statistics import PoolStatistics, StatisticsRegion

__all__ = [
    "DebugReport",
    "DriverPoolStatistics",
    "HostPoolStatistics",
    "NativePool",
    "PinnedPool",
    "Pool",
    "PoolStatistics",
    "StatisticsRegion",
    "UnifiedPool",
]
