"""What Python adds to the driver interface: allocation, asynchronous copies, pinned bandwidth.

Runs on any device, also ``--device cpu``. The peer in the same run is ``bench_copy``, the same
calls from C++ through our own drivers: build it with ``cmake -S . -B build/native
-DRINGMEM_PYTHON=OFF -DRINGMEM_NATIVE_TESTS=ON && cmake --build build/native --target bench_copy``,
or name it in ``RINGMEM_BENCH_COPY``. Without it our own figures are printed alone. The comparison
with the bare CUDA driver is in bench_buffers.py and bench_copies.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bench_buffers
import bench_copies
import harness
import numpy as np

import ringmem as rm

Samples = dict[str, list[float]]


def cpp_peer(device: rm.Device) -> Samples:
    """Run bench_copy on the device; nothing, and the reason on stderr, where that fails."""
    default = Path(__file__).parents[1] / "build" / "native" / "tests" / "native" / "bench_copy"
    program = Path(os.environ.get("RINGMEM_BENCH_COPY", default))
    if not program.is_file():
        print(f"no C++ peer: {program} is not there", file=sys.stderr)
        return {}
    done = subprocess.run(
        [program, device.platform, str(device.ordinal)], capture_output=True, text=True, timeout=300
    )
    if done.returncode != 0:
        print(f"no C++ peer: {done.stderr.strip()}", file=sys.stderr)
        return {}
    samples: Samples = json.loads(done.stdout)
    return samples


def measure(device: rm.Device, samples: int) -> Samples:
    """Our side of every figure, under the names of the peer's."""
    up, down = device.create_stream(), device.create_stream()
    nbytes = (256 if device.platform == "cuda" else 16) << 20
    ours: Samples = {}
    for name, size in bench_buffers.SIZES.items():
        pair = bench_buffers.ringmem_pair(device, up, size)
        ours[f"pair {name}"] = list(harness.time_ns(pair, batch=100, samples=samples))
    with (
        rm.PinnedBuffer(nbytes, device=device) as source,
        rm.PinnedBuffer(nbytes, device=device) as target,
        rm.zeros(nbytes, device=device, stream=up) as first,
        rm.zeros(nbytes, device=device, stream=down) as second,
    ):
        for buffer in (source, target):
            buffer.fill(1)
            buffer.stream.synchronize()
        ours["submit"] = bench_copies.submit_ns(first, source, up)

        def copy_up() -> None:
            first.copy_from(source, stream=up)

        def copy_down() -> None:
            second.copy_to(target, stream=down)

        def copy_both() -> None:
            copy_up()
            copy_down()

        ways = {"up": copy_up, "down": copy_down, "both": copy_both}
        for name, way in ways.items():
            ours[name] = bench_copies.gb_per_s(way, [up, down], nbytes, max(samples // 7, 3))
    return ours


def main() -> None:
    options = harness.arguments(__doc__)
    device = rm.Device(options.device)
    ours = measure(device, 20 if options.quick else 200)
    theirs = cpp_peer(device)
    rows = []
    for name, samples in ours.items():
        unit = "ns" if name == "submit" or name.startswith("pair") else "GB/s"
        entry = harness.row(f"{name}, ringmem", samples, unit)
        rows.append(entry)
        if name not in theirs:
            continue
        peer = float(np.median(theirs[name]))
        rows.append(harness.row(f"{name}, C++", theirs[name], unit))
        if unit == "GB/s":
            entry["of_peer"] = entry["median"] / peer
        else:
            entry["above_peer"] = entry["median"] - peer
        if name.startswith("pair"):
            entry["bound"] = 1.2 * peer + 300
    harness.report("waist", device, rows, options.json)


if __name__ == "__main__":
    main()
