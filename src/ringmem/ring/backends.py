"""Which backend serves a device."""

from __future__ import annotations

from ringmem.device import Device
from ringmem.ring.backend import Backend

__all__ = ["backend_for"]


def backend_for(device: Device, isolated: bool) -> Backend:
    """Return a new backend; its compilers and drivers are only imported here."""
    if isolated:
        from ringmem.ring.isolated import IsolatedBackend

        return IsolatedBackend(device)
    if device.platform == "cpu":
        from ringmem.ring.cpu import CpuBackend

        return CpuBackend()
    from ringmem.ring.cuda import CudaBackend

    return CudaBackend(device)
