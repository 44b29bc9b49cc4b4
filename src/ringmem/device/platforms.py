"""Which driver stands behind a platform's name, and the one Device object of each device.

A platform is the first half of a device's name: ``cuda`` or ``cpu``. Its driver is loaded at the
first use. ``simulate()`` puts another driver in the place of ``cpu`` for a while.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import TYPE_CHECKING

from ringmem.native import _native
from ringmem.native.errors import InvalidDeviceError, NotInitializedError
from ringmem.native.locks import Lock

if TYPE_CHECKING:
    from ringmem.device.device import Device

__all__ = ["PLATFORMS", "device_count", "devices_of", "driver_of", "replace_driver"]

PLATFORMS = ("cuda", "cpu")

_lock = Lock()
# What stands in for a platform's driver, the innermost last. Replaced whole, so that whoever reads
# needs no lock.
_replaced: dict[str, tuple[_native.Driver, ...]] = {}
# One Device a device. The key is the driver's identity: a Device keeps its driver alive, so an
# entry that is there was made for this very driver.
_cache: weakref.WeakValueDictionary[tuple[int, int], Device] = weakref.WeakValueDictionary()
# Devices of the platforms' own drivers live as long as the process.
_kept: dict[tuple[int, int], Device] = {}
# Counts what may change which device a name means: another driver stands in, or the process forked
# and a driver may refuse the child.
generation = 0


def _next_generation() -> None:
    global generation
    generation += 1


@functools.cache
def watch_forks() -> None:
    """Count forks too, from the first call on."""
    os.register_at_fork(after_in_child=_next_generation)


def driver_of(platform: str) -> _native.Driver:
    """Return the raw driver of a platform: its own, or the one that stands in for it."""
    replaced = _replaced.get(platform)
    if replaced:
        return replaced[-1]
    return _native.cuda_driver() if platform == "cuda" else _native.host_driver()


def replace_driver(platform: str, driver: _native.Driver, *, active: bool) -> None:
    """Let `driver` stand in for a platform's own (`active`), or no longer."""
    with _lock:
        stack = _replaced.get(platform, ())
        if active:
            _replaced[platform] = (*stack, driver)
        elif any(entry is driver for entry in stack):
            index = max(i for i, entry in enumerate(stack) if entry is driver)
            _replaced[platform] = stack[:index] + stack[index + 1 :]
        _next_generation()


def is_replaced(platform: str) -> bool:
    """Whether another driver stands in for the platform's own."""
    return bool(_replaced.get(platform))


def device_count(platform: str) -> int:
    """Return the number of devices; 0 where the platform has no driver."""
    return count_of(driver_of(platform))


def count_of(driver: _native.Driver) -> int:
    """Return the number of devices of a driver; 0 where it cannot be used."""
    try:
        return driver.device_count()
    except NotInitializedError:
        return 0


def device_of(driver: _native.Driver, ordinal: int) -> Device:
    """Return the one Device object of a driver's device."""
    from ringmem.device.device import Device

    key = (id(driver), ordinal)
    with _lock:
        device = _cache.get(key)
        if device is None:
            device = Device._create(driver, ordinal)
            _cache[key] = device
            if driver is driver_of(driver.platform) and not is_replaced(driver.platform):
                _kept[key] = device
        return device


def devices_of(driver: _native.Driver) -> list[Device]:
    """List the devices of an explicit driver, such as a simulation or a wrapped one.

    Parameters
    ----------
    driver : ringmem.native._native.Driver
        A raw driver.

    Returns
    -------
    list of Device
        In the driver's order. The same objects every time, as long as somebody holds them.

    Raises
    ------
    NotInitializedError
        The driver cannot be used on this machine.
    """
    return [device_of(driver, ordinal) for ordinal in range(driver.device_count())]


def existing_names() -> list[str]:
    """Return the names of all devices there are, for error messages."""
    return [f"{p}:{i}" for p in PLATFORMS for i in range(device_count(p))]


def parse_name(name: str) -> tuple[str, int]:
    """Split ``"cuda:1"`` into ``("cuda", 1)``; a platform alone means its device 0."""
    platform, colon, number = name.partition(":")
    if platform in PLATFORMS and (not colon or (number.isascii() and number.isdigit())):
        return platform, int(number) if colon else 0
    raise InvalidDeviceError(
        f"{name!r} names no device: give 'cuda', 'cuda:<ordinal>', 'cpu' or 'cpu:<ordinal>'; "
        f"this machine has {', '.join(existing_names())}"
    )


def device_named(name: str) -> Device:
    """Return the device that a name means; the typed error says what there is instead."""
    platform, ordinal = parse_name(name)
    driver = driver_of(platform)
    known = _cache.get((id(driver), ordinal))
    if known is not None:
        return known
    try:
        count = driver.device_count()
    except NotInitializedError as error:
        # In a forked child there may be nothing to install: the error says what would do.
        remedy = (
            ". Install the NVIDIA driver, let RINGMEM_CUDA_LIBRARY name its libcuda.so.1, or use "
            "Device('cpu')"
            if platform == "cuda" and not _native.forks()
            else ""
        )
        raise NotInitializedError(
            f"{name!r} needs a {platform.upper()} driver: {error}{remedy}",
            operation=error.operation,
            code=error.code,
            name=error.name,
        ) from error
    if ordinal >= count:
        raise InvalidDeviceError(
            f"there is no device {name!r}: this machine has {', '.join(existing_names())}"
        )
    return device_of(driver, ordinal)
