"""What is on this machine, as plain values: devices, peers, versions, and what is missing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from typing import TYPE_CHECKING, Any

from ringmem.native import _native
from ringmem.native.errors import RingmemError

if TYPE_CHECKING:
    from ringmem.device import Device

__all__ = ["inventory"]

# Package -> what ringmem uses it for, and the extra that brings it.
_OPTIONAL = {
    "cuda-bindings": ("the driver's types for other libraries", "cuda13"),
    "cuda-core": ("compiling, linking and launching ring kernels", "cuda13"),
    "nvidia-cuda-nvrtc": ("compiling CUDA C++", "cuda13"),
    "nvidia-nvjitlink": ("linking device code", "cuda13"),
    "nvidia-cuda-cccl": ("device headers", "cuda13"),
    "numba": ("ring handlers in Python, on the CPU", "kernels"),
    "numba-cuda": ("ring handlers in Python, on the GPU", "kernels"),
    "matplotlib": ("timelines as pictures", "plot"),
}
# With CUDA 12 the same things have other names.
_TWINS = {
    "nvidia-cuda-nvrtc": "nvidia-cuda-nvrtc-cu12",
    "nvidia-nvjitlink": "nvidia-nvjitlink-cu12",
    "nvidia-cuda-cccl": "nvidia-cuda-cccl-cu12",
}
_NEIGHBOURS = ("torch", "cupy-cuda13x", "cupy-cuda12x", "jax", "rmm-cu13", "rmm-cu12", "ml-dtypes")


def inventory(*, echo: bool = False) -> dict[str, Any]:
    """Collect everything that ``ringmem info`` shows.

    Parameters
    ----------
    echo : bool, default False
        Also run the echo test of memory visibility on each device.

    Returns
    -------
    dict
        ``ringmem``, ``python``, ``numpy``, ``system``: versions. ``cuda``: the driver's version
        and, without one, the reason. ``devices``: one dict each; one that does not answer has
        ``error`` in place of what it would say. ``peers``: the matrix by name. ``packages``:
        versions by name, None for what is not installed. ``missing``: what, for what, and how
        to get it.
    """
    from ringmem.device import devices

    cuda = _cuda()
    packages = {name: _version(name) for name in _OPTIONAL}
    for name, twin in _TWINS.items():
        packages[name] = packages[name] or _version(twin)
    neighbours = {name: known for name in _NEIGHBOURS if (known := _version(name))}
    found = devices()
    return {
        "ringmem": _version("ringmem"),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "system": platform.platform(),
        "cuda": cuda,
        "devices": [_device(device, echo=echo) for device in found],
        "peers": _peers(found),
        "packages": packages | neighbours,
        "missing": _missing(cuda, packages),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> dict[str, str | None]:
    try:
        number = _native.cuda_driver().driver_version()
    except RingmemError as error:
        return {"driver": None, "reason": str(error)}
    return {"driver": f"{number // 1000}.{number % 1000 // 10}", "reason": None}


def _device(device: Device, *, echo: bool) -> dict[str, Any]:
    """One device; a broken one must not hide the others."""
    try:
        memory = device.memory_info()
        decision = device.memory_visibility(echo=echo)
        return {
            "name": device.name,
            "product_name": device.product_name,
            "uuid": device.uuid,
            "memory": {"free": memory.free, "total": memory.total},
            "memory_visibility": {
                "visibility": decision.visibility.value,
                "platform": decision.platform.value,
                "managed_concurrent": decision.managed_concurrent,
                "system_atomics": decision.system_atomics,
                "reasons": list(decision.reasons),
                "echo": decision.echo._asdict() if decision.echo else None,
            },
            "capabilities": dataclasses.asdict(device.capabilities),
        }
    except RingmemError as error:
        return {"name": device.name, "error": str(error)}


def _peers(found: list[Device]) -> dict[str, Any]:
    from ringmem.device import peer_matrix

    names = [device.name for device in found]
    try:
        matrix = peer_matrix(found)
    except RingmemError as error:
        return {"devices": names, "error": str(error)}
    return {
        "devices": names,
        "can_access": [list(row) for row in matrix.can_access],
        "enabled": [list(row) for row in matrix.enabled],
    }


def _missing(cuda: dict[str, str | None], packages: dict[str, str | None]) -> list[dict[str, str]]:
    missing = []
    if cuda["driver"] is None:
        missing.append(
            {
                "what": "CUDA driver",
                "for": "GPUs; the CPU device does the same work without one",
                "how": "install NVIDIA's driver for this system",
            }
        )
    old = (cuda["driver"] or "").startswith("12.")
    for name, (purpose, extra) in _OPTIONAL.items():
        if packages[name] is None:
            brings = "cuda12" if old and extra == "cuda13" else extra
            missing.append(
                {"what": name, "for": purpose, "how": f"pip install 'ringmem[{brings}]'"}
            )
    return missing
