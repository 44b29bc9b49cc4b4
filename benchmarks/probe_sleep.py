"""Where the time of a first sleep and of a wake goes: touching, pinning, mapping, copying.

    python benchmarks/probe_sleep.py [--device cuda:0] [--gib 16] [--pin-gib 4] [--seconds 55]

First the phases alone: anonymous memory touched and registered, by so many threads, in pieces of so
many MiB, with and without huge pages. Then whole cycles of sleep and wake in several settings. Ends
when the time is up, whatever is left to try. Not a benchmark: it is for choosing constants.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import ringmem as rm
from ringmem.native import _native

MIB, GIB = 2**20, 2**30
HUGE = 2 * MIB
MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE = 14, 15, 23
started = time.monotonic()

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def on_threads(
    count: int, call: Callable[[int], object], pieces: Iterator[int] | list[int]
) -> None:
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(call, pieces))


# --- the phases alone -----------------------------------------------------------------------------


def touch(at: int, nbytes: int) -> None:
    if libc.madvise(at, nbytes, MADV_POPULATE_WRITE) != 0:
        libc.memset(at, 0, nbytes)


def pin(
    device: rm.Device, nbytes: int, piece: int, touchers: int, pinners: int, huge: bool
) -> None:
    """One line: the seconds of touching, registering, unregistering and unmapping."""
    whole = libc.mmap(None, nbytes + HUGE, 3, 0x22, -1, 0)
    base = -(-whole // HUGE) * HUGE
    libc.madvise(base, nbytes, MADV_HUGEPAGE if huge else MADV_NOHUGEPAGE)
    pieces = list(range(base, base + nbytes, piece))
    driver, ordinal = device.driver, device.ordinal
    took = [
        seconds(lambda: on_threads(touchers, lambda at: touch(at, piece), pieces)),
        seconds(
            lambda: on_threads(pinners, lambda at: driver.host_register(ordinal, at, piece), pieces)
        ),
        seconds(lambda: on_threads(1, lambda at: driver.host_unregister(ordinal, at), pieces)),
        seconds(lambda: libc.munmap(whole, nbytes + HUGE)),
    ]
    rates = "  ".join(
        f"{what} {nbytes / spent / 1e9:6.1f}"
        for what, spent in zip(("touch", "register", "unregister", "unmap"), took, strict=True)
    )
    print(
        f"piece {piece // MIB:>5} MiB, touch by {touchers:>2}, register by {pinners:>2}, "
        f"huge {'on ' if huge else 'off'}: GB/s {rates}",
        flush=True,
    )


# --- whole cycles ---------------------------------------------------------------------------------


class Allocator:
    """What buffers take a tag's native half through."""

    def __init__(self, core: _native.Resident) -> None:
        self.native_allocator = core


class Sleeper:
    """A tag's native half with settings that the public tag does not have, and its memory."""

    def __init__(
        self, device: rm.Device, nbytes: int, piece: int, builders: int, slot: int, step: int
    ) -> None:
        self.device = device
        self.core = _native.Resident.create(
            device, f"probe {time.monotonic()}", 0, 0, 32 * MIB, slot, piece, builders, step
        )
        self.buffer = rm.empty(nbytes, "uint8", device=device, allocator=Allocator(self.core))
        self.buffer.fill(7)
        self.buffer.stream.synchronize()

    def cycle(self) -> list[float]:
        streams = [(self.device.ordinal, 0)]
        times = [seconds(lambda: self.core.sleep(streams, None))]
        times.append(seconds(lambda: self.core.wake(None)))
        return [self.buffer.nbytes / spent / 1e9 for spent in times]

    def close(self) -> None:
        assert np.all(self.buffer[:MIB].to_numpy() == 7)
        assert np.all(self.buffer[-MIB:].to_numpy() == 7)
        self.buffer.close()
        self.device.default_stream.synchronize()
        self.core.close()


def cycles(
    device: rm.Device, nbytes: int, piece: int, builders: int, slot: int, steps: dict[str, int]
) -> None:
    """One line a setting: sleep and wake from no arena, then with it."""
    before = available()
    first = None
    for name, step in steps.items():
        sleeper = Sleeper(device, nbytes, piece, builders, slot, step)
        runs = [sleeper.cycle() for _ in range(2)]
        keep = first or _native.Resident.create(
            device, "keeps the arena", 0, HUGE, 32 * MIB, slot, piece
        )
        first = keep
        sleeper.close()
        print(
            f"piece {piece // MIB:>5} MiB, builders {builders or 'auto':>4}, slot {slot // MIB:>3} "
            f"MiB, wake maps {name:<9}: GB/s  "
            + "  ".join(f"sleep {s:5.1f} wake {w:5.1f}" for s, w in runs),
            flush=True,
        )
    assert first is not None
    first.close()
    del first, keep, sleeper
    took = seconds(lambda: until_given_back(before - GIB // 4))
    print(f"    arena given back in {took:.1f} s", flush=True)


def until_given_back(nbytes: int) -> None:
    deadline = time.monotonic() + 8
    while available() < nbytes and time.monotonic() < deadline:
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=None)
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--pin-gib", type=float, default=4)
    parser.add_argument("--seconds", type=float, default=55)
    options = parser.parse_args()
    device = rm.Device(options.device)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    print(
        f"{device.product_name}, Linux {platform.release()}, {os.cpu_count()} cores, "
        f"{available() / GIB:.0f} GiB available, huge pages: "
        f"{huge.read_text().strip() if huge.exists() else 'unknown'}"
    )
    device.default_stream.synchronize()

    def left() -> bool:
        return time.monotonic() - started < options.seconds

    nbytes = int(options.gib * GIB) // MIB * MIB
    whole = {"first+rest": 0, "by handle": 1, "all first": 2**62}
    plans = [
        (128, 0, 32, whole),
        (256, 8, 32, {"first+rest": 0}),  # as it was, but for the one mapping
        (64, 16, 32, {"first+rest": 0}),
        (128, 4, 64, {"first+rest": 0, "all first": 2**62}),
        (512, 16, 32, {"first+rest": 0}),
    ]
    pin_nbytes = int(options.pin_gib * GIB) // GIB * GIB or GIB
    phases = [
        (256, 8, 1, True), (256, 8, 2, True), (256, 8, 4, True), (256, 8, 8, True),
        (256, 16, 4, True), (256, 4, 4, True), (64, 8, 4, True), (128, 8, 4, True),
        (512, 8, 4, True), (1024, 4, 4, True), (256, 8, 1, False), (256, 8, 4, False),
    ]  # fmt: skip
    for piece, builders, slot, steps in plans[:1]:
        cycles(device, nbytes, piece * MIB, builders, slot * MIB, steps)
    for piece, touchers, pinners, with_huge in phases:
        if left():
            pin(device, pin_nbytes, piece * MIB, touchers, pinners, with_huge)
    for piece, builders, slot, steps in plans[1:]:
        if left():
            cycles(device, nbytes, piece * MIB, builders, slot * MIB, steps)
    print(f"{time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
