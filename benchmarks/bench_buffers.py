"""What it costs to allocate and close a DeviceBuffer from the driver's pool.

Peers in the same run: the driver's own pair of calls, timed in C in this process (peer_driver.c),
and what the arrays of other libraries cost where these are installed. The driver's own cost swings
by half from one second to the next, so our batches and its alternate.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import harness
import numpy as np
import peers

import ringmem as rm
from ringmem import DeviceBuffer
from ringmem.cli.quiet_core import on_quiet_core

SIZES = {"256 B": 256, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
BATCH = 100


def ringmem_pair(device: rm.Device, stream: rm.Stream, nbytes: int) -> Callable[[], object]:
    def pair() -> None:
        DeviceBuffer(nbytes, device=device, stream=stream).close()

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


def side_by_side(
    ours: Callable[[], object],
    theirs: Callable[[int, int], float] | None,
    nbytes: int,
    samples: int,
    settle: Callable[[], None],
) -> tuple[np.ndarray, np.ndarray]:
    """Nanoseconds of a pair, ours and the driver's, in batches that alternate."""
    mine, peer = np.empty(samples), np.full(samples, np.nan)
    for i in range(-2, samples):  # the first two warm up
        settle()
        one = harness.time_ns(ours, batch=BATCH, samples=1, warm_up=False)[0]
        other = theirs(nbytes, BATCH) if theirs else np.nan
        if i >= 0:
            mine[i], peer[i] = one, other
    return mine, peer


def main() -> None:
    options = harness.arguments(__doc__)
    device = rm.Device(options.device)
    on_gpu = device.platform == "cuda"
    samples = 20 if options.quick else 400
    stream = device.create_stream()
    theirs = peers.driver_pair(device.ordinal) if on_gpu else None
    rows = []
    for name, nbytes in SIZES.items():
        pair = ringmem_pair(device, stream, nbytes)
        with on_quiet_core() as settle:
            ours, peer = side_by_side(pair, theirs, nbytes, samples, settle)
        rows.append(harness.row(f"{name}, DeviceBuffer", ours, "ns"))
        if theirs:
            bound = 1.2 * float(np.median(peer)) + 300
            within = bool(np.median(ours) <= bound)
            rows[-1].update(bound=bound, within=within, above=float(np.median(ours - peer)))
            rows.append(harness.row(f"{name}, driver from C", peer, "ns"))
        if on_gpu:
            for other, call in other_pairs(nbytes).items():
                with on_quiet_core():
                    times = harness.time_ns(call, batch=BATCH, samples=samples // 2)
                rows.append(harness.row(f"{name}, {other}", times, "ns"))
    stream.synchronize()
    harness.report("buffers", device, rows, options.json)


if __name__ == "__main__":
    main()
