"""What it costs to allocate and close a DeviceBuffer from the driver's pool.

Peers in the same run: the driver's own pair of calls from C (peer_driver.c), and what the arrays of
other libraries cost where these are installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import harness
import numpy as np
import peers

import ringmem as rm

SIZES = {"256 B": 256, "1 MiB": 1 << 20, "64 MiB": 64 << 20}


def ringmem_pair(device: rm.Device, stream: rm.Stream, nbytes: int) -> Callable[[], object]:
    def pair() -> None:
        rm.DeviceBuffer(nbytes, device=device, stream=stream).close()

    return pair


def other_pairs(nbytes: int) -> dict[str, Callable[[], object]]:
    pairs: dict[str, Callable[[], object]] = {}
    if importlib.util.find_spec("cupy"):
        import cupy

        pairs["cupy.empty"] = lambda: cupy.empty(nbytes, np.uint8)
    if importlib.util.find_spec("torch"):
        import torch

        pairs["torch.empty"] = lambda: torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core"):
        from cuda.core import Device

        peer = Device(0)
        peer.set_current()
        stream = peer.create_stream()
        pairs["cuda.core"] = lambda: peer.allocate(nbytes, stream=stream).close(stream)
    return pairs


def main() -> None:
    options = harness.arguments(__doc__)
    device = rm.Device(options.device)
    on_gpu = device.platform == "cuda"
    samples = 20 if options.quick else 200
    stream = device.create_stream()
    theirs = peers.driver_peer(device.ordinal) if on_gpu else None
    rows = []
    for name, nbytes in SIZES.items():
        ours = harness.time_ns(ringmem_pair(device, stream, nbytes), batch=100, samples=samples)
        rows.append(harness.row(f"{name}, DeviceBuffer", ours, "ns"))
        if theirs:
            pair = theirs[f"pair {name}"]
            bound = 1.2 * float(np.median(pair)) + 300
            rows[-1]["bound"] = bound
            rows[-1]["within"] = bool(np.median(ours) <= bound)
            rows.append(harness.row(f"{name}, driver from C", pair, "ns"))
        if on_gpu:
            for peer, call in other_pairs(nbytes).items():
                times = harness.time_ns(call, batch=100, samples=samples)
                rows.append(harness.row(f"{name}, {peer}", times, "ns"))
    stream.synchronize()
    harness.report("buffers", device, rows, options.json)


if __name__ == "__main__":
    main()
