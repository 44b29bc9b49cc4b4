"""Every word of every reply of very many messages, of 56, 112 and 240 bytes.

    python benchmarks/verify_ring.py --device cuda:0 --messages 1000000000 --rings 4

A third of the messages of each size, shared by the rings, each with a host thread of its own.
Prints one JSON line; exits with 1 where a word was wrong or the kernel counted otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ringmem.cli.bench_ring import PAYLOADS, _Bench
from ringmem.device import Device
from ringmem.native import _native

BATCH = 512


def verify(device: Device, nbytes: int, messages: int, rings: int) -> dict[str, Any]:
    """Wrong words, and what the kernel counted, for messages of one size."""
    share = -(-messages // rings)
    with _Bench(device, 1000, rings)._kernel(nbytes, rings=rings) as kernel:

        def feed(ring: int) -> int:
            pair = kernel._pairs[ring]
            ends = (pair.producer._native, pair.consumer._native)
            return int(_native.measure_stream(*ends, share, BATCH, in_place=False)[1])

        start = time.perf_counter()
        with ThreadPoolExecutor(rings) as pool:
            wrong = sum(pool.map(feed, range(rings)))
        seconds = time.perf_counter() - start
        kernel.drain(10)
        processed = sum(kernel.telemetry(ring).processed for ring in range(rings))
    return {
        "messages": share * rings,
        "processed": processed,
        "wrong_words": wrong,
        "messages_per_second": round(share * rings / seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--messages", type=int, default=1_000_000_000)
    parser.add_argument("--rings", type=int, default=1)
    arguments = parser.parse_args()
    device = Device(arguments.device)
    each = -(-arguments.messages // len(PAYLOADS))
    found = {str(n): verify(device, n, each, arguments.rings) for n in PAYLOADS}
    print(json.dumps({"device": device.name, "rings": arguments.rings, "by_nbytes": found}))
    good = all(
        one["wrong_words"] == 0 == one["processed"] - one["messages"] for one in found.values()
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
