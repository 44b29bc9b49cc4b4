"""Floor 5: rings between threads, processes and devices, and the kernels that serve them."""

from ringmem.ring.bridge import BridgeCounters, RingBufferBridge
from ringmem.ring.bridge_memory import DeviceRing
from ringmem.ring.cpu import NativeHandler
from ringmem.ring.endpoints import Consumer, Producer
from ringmem.ring.handlers import CudaSource, LtoIr
from ringmem.ring.kernel import RingKernel
from ringmem.ring.lifecycle import KernelState
from ringmem.ring.ring import Ring, poll_interval_us, set_poll_interval_us
from ringmem.ring.strategies import Async, DmaPolling, Mapped, Sync, Unified
from ringmem.ring.telemetry import Telemetry

__all__ = [
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
]
