"""What the pools cost and how tight they are: the rows of the figures, each with its bar.

Peers in the same run, where they are installed, on a CUDA device. The recorded traces are replayed
from the folder that RINGMEM_TRACES names, else the small one that is shipped.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import harness

import ringmem as rm
from ringmem.cli.bench_pool import PEERS, run_bench
from ringmem.cli.replay import ReplaySettings, find_capacity, run_replay
from ringmem.observe import Trace


def traces() -> list[Trace]:
    folder = os.environ.get("RINGMEM_TRACES")
    if not folder:
        return [Trace.shipped()]
    return [Trace.load(file) for file in sorted(Path(folder).glob("*.npz"))]


def judged(row: harness.Row, bar: float, *, exact: bool = False) -> harness.Row:
    passed = row["median"] == bar if exact else row["median"] <= bar
    return {**row, "bar": bar, "passed": bool(passed)}


def replay_rows(trace: Trace, device: rm.Device) -> list[harness.Row]:
    plain = ReplaySettings(trace=trace, device=device.name, repetitions=2)
    free = run_replay(plain)
    tight = run_replay(replace(plain, tight=True, repetitions=1))
    capacity = int(1.05 * trace.peak_live_bytes)
    narrow = run_replay(replace(plain, capacity=capacity, repetitions=1))
    late = run_replay(replace(plain, streams=4, late=100, repetitions=1))
    smallest = find_capacity(plain)
    name = trace.name
    expandable = {"llama-varlen": 1.043, "moe": 1.065, "vision-multires": 1.009, "graph-net": 1.199}

    def one(what: str, value: float, unit: str, **more: object) -> harness.Row:
        return harness.row(f"{name}, {what}", [value], unit, **more)

    first, second = free["repetitions"]
    rows = [
        one("p50 of an operation", first["p50"], "ns", p99_ns=first["p99"], mean_ns=first["mean"]),
        judged(one("driver calls, second time", second["driver_calls"], "calls"), 0, exact=True),
        one("reserved over live", free["reserved_over_live"], "ratio"),
        judged(one("reserved over live, tight", tight["reserved_over_live"], "ratio"), 1.02),
        one("reserved over live, 4 streams 100 late", late["reserved_over_live"], "ratio"),
    ]
    if name in expandable:
        rows[2] = judged(rows[2], expandable[name])
    if device.platform == "cpu":
        rows[0] = judged(rows[0], 200)
    over = smallest["minimum_over_live"]
    if over is not None:
        rows.append(judged(one("smallest capacity over live", over, "ratio"), 1.02))
    slower = narrow["repetitions"][0]["seconds"] / first["seconds"]
    rows.append(
        judged(
            one("time at 1.05 of the peak over free", slower, "ratio", remaps=narrow["remaps"]),
            1.3 if narrow["completed"] else -1,
        )
    )
    return rows


def main() -> None:
    options = harness.arguments(__doc__)
    device = rm.Device(options.device)
    rows = run_bench(device, PEERS, quick=options.quick)
    for trace in traces():
        rows += replay_rows(trace, device)
    harness.report("pool", device, rows, options.json)


if __name__ == "__main__":
    main()
