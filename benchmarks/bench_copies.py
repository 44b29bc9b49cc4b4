"""Copies between pinned and device memory, and what one asynchronous copy call costs in Python.

The peer is a C program that makes the same driver calls (peer_driver.c), in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import harness
import numpy as np
import peers

import ringmem as rm

SMALL_NBYTES = 4096


def gb_per_s(
    copy: Callable[[], object], streams: list[rm.Stream], nbytes: int, samples: int
) -> list[float]:
    rates = []
    for i in range(-3, samples):
        start = time.perf_counter()
        copy()
        for stream in streams:
            stream.synchronize()
        if i >= 0:
            rates.append(nbytes / (time.perf_counter() - start) / 1e9)
    return rates


def submit_ns(store: rm.DeviceBuffer, source: rm.PinnedBuffer, stream: rm.Stream) -> list[float]:
    """Nanoseconds of a call that submits a small copy; the queue is never full."""
    part, small = store[:SMALL_NBYTES], source[:SMALL_NBYTES]
    result = []
    for _ in range(200):
        start = time.perf_counter_ns()
        for _ in range(100):
            part.copy_from(small, stream=stream)
        result.append((time.perf_counter_ns() - start) / 100)
        stream.synchronize()
    return result


def main() -> None:
    options = harness.arguments(__doc__)
    device = rm.Device(options.device)
    on_gpu = device.platform == "cuda"
    nbytes = (256 if on_gpu else 16) << 20
    samples = 5 if options.quick else 30
    up, down = device.create_stream(), device.create_stream()
    rows = []
    with (
        rm.PinnedBuffer(nbytes, device=device) as source,
        rm.PinnedBuffer(nbytes, device=device) as target,
        rm.DeviceBuffer(nbytes, device=device, stream=up) as first,
        rm.DeviceBuffer(nbytes, device=device, stream=down) as second,
    ):
        np.asarray(source)[:] = 1
        np.asarray(target)[:] = 2
        first.fill(3, stream=up)
        second.fill(4, stream=down)

        def both() -> None:
            first.copy_from(source, stream=up)
            second.copy_to(target, stream=down)

        ways: dict[str, Callable[[], object]] = {
            "up": lambda: first.copy_from(source, stream=up),
            "down": lambda: second.copy_to(target, stream=down),
            "both": both,
        }
        ours = {name: gb_per_s(copy, [up, down], nbytes, samples) for name, copy in ways.items()}
        ours["submit"] = submit_ns(first, source, up)
    theirs = peers.driver_peer(device.ordinal) if on_gpu else None
    for name, values in ours.items():
        unit = "ns" if name == "submit" else "GB/s"
        rows.append(harness.row(f"{name}, ringmem", values, unit))
        if theirs:
            rows.append(harness.row(f"{name}, C", theirs[name], unit))
            ratio = float(np.median(values) / np.median(theirs[name]))
            rows[-2]["of_peer"] = ratio
    harness.report("copies", device, rows, options.json)


if __name__ == "__main__":
    main()
