"""A ring kernel under load for minutes: no loss, no duplicate, no drift of the round trip's p99.

    python benchmarks/soak_ring.py --device cuda:0 --seconds 480

Alternates bursts of batches with single round trips. Every word of message i tells i, so a reply
that is lost, repeated or torn is a wrong word or a stop; the kernel's own count is compared at the
end. Prints one JSON line; exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np

from ringmem.cli.bench_ring import _Bench
from ringmem.device import Device
from ringmem.native import _native
from ringmem.ring import RingKernel

TENTHS = 10
BURST, BATCH, TRIPS = 500_000, 512, 2_000
DRIFT = 1.5  # of p99, last tenth against first


def tenth(kernel: RingKernel, seconds: float, nbytes: int) -> dict[str, Any]:
    """One tenth of the run: messages, wrong words, and all round trips in us."""
    pair = kernel._pairs[0]
    ends = (pair.producer._native, pair.consumer._native)
    trips, messages, wrong = [], 0, 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        _, bad = _native.measure_stream(*ends, BURST, BATCH, in_place=False)
        raw, bad_trips = _native.measure_round_trips(*ends, TRIPS)
        trips.append(np.frombuffer(raw, np.uint32) / 1000.0)
        wrong += bad + bad_trips
        messages += BURST + TRIPS
    us = np.concatenate(trips)
    return {
        "messages": messages,
        "wrong_words": wrong,
        "p50_us": round(float(np.percentile(us, 50)), 3),
        "p99_us": round(float(np.percentile(us, 99)), 3),
    }


def run(device: str, seconds: float, nbytes: int) -> dict[str, Any]:
    """The whole run, as the JSON line has it."""
    bench = _Bench(Device(device), 1000, 1)
    with bench._kernel(nbytes) as kernel:
        tenth(kernel, min(seconds / 20, 2.0), nbytes)  # warm
        tenths = [tenth(kernel, seconds / TENTHS, nbytes) for _ in range(TENTHS)]
        sent, received = kernel._pairs[0].producer.tail, kernel._pairs[0].consumer.head
        kernel.drain(10)
        processed = kernel.telemetry().processed
    first, last = tenths[0], tenths[-1]
    return {
        "device": device,
        "seconds": seconds,
        "nbytes": nbytes,
        "messages": sum(one["messages"] for one in tenths),
        "lost": sent - received,
        "repeated": processed - sent,
        "wrong_words": sum(one["wrong_words"] for one in tenths),
        "p50_us": [one["p50_us"] for one in tenths],
        "p99_us": [one["p99_us"] for one in tenths],
        "p99_drift": round(last["p99_us"] / first["p99_us"], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--nbytes", type=int, default=56, choices=(56, 112, 240))
    arguments = parser.parse_args()
    result = run(arguments.device, arguments.seconds, arguments.nbytes)
    print(json.dumps(result))
    good = not result["lost"] and not result["repeated"] and not result["wrong_words"]
    return 0 if good and result["p99_drift"] <= DRIFT else 1


if __name__ == "__main__":
    sys.exit(main())
