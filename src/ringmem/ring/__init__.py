"""Floor 5: rings between threads, processes and devices, and the kernels that serve them."""

from ringmem.ring.endpoints import Consumer, Producer
from ringmem.ring.ring import Ring, poll_interval_us, set_poll_interval_us

__all__ = [
    "Consumer",
    "Producer",
    "Ring",
    "poll_interval_us",
    "set_poll_interval_us",
]
