"""Floor 5: rings between threads, processes and devices, and the kernels that serve them."""

from ringmem.ring.cpu import NativeHandler
from ringmem.ring.endpoints import Consumer, Producer
from ringmem.ring.kernel import RingKernel
from ringmem.ring.lifecycle import KernelState
from ringmem.ring.ring import Ring, poll_interval_us, set_poll_interval_us
from ringmem.ring.telemetry import Telemetry

__all__ = [
    "Consumer",
    "KernelState",
    "NativeHandler",
    "Producer",
    "Ring",
    "RingKernel",
    "Telemetry",
    "poll_interval_us",
    "set_poll_interval_us",
]
