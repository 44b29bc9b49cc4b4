"""How long a new process waits for its first reply: with nothing compiled, and from the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from ringmem.device import Device
from ringmem.native.errors import RingmemError

__all__ = ["first_replies"]

_TIMEOUT_S = 60.0

# The clock starts when the package is imported and the device is in use, as in a program that
# already works with it; what a kernel imports and compiles counts.
_CHILD = """
import json, sys, time
import numpy as np
from ringmem import DeviceBuffer, Device, RingKernel
from ringmem.cli.bench_ring import _ECHOES
device = Device(sys.argv[1])
DeviceBuffer(1, "u1", device=device).close()
if device.platform == "cuda":
    import cuda.core
message = np.dtype([("words", "u8", (7,))])
record = np.zeros(1, message)[0]
start = time.perf_counter()
with RingKernel(_ECHOES[7], message=message, device=device) as kernel:
    kernel.call(record, timeout_s=30.0)
    print(json.dumps(time.perf_counter() - start))
"""


def first_replies(device: Device) -> dict[str, Any]:
    """Seconds from ``RingKernel(...)`` to its first reply in new processes: not cached, cached.

    Returns
    -------
    dict
        ``first_reply_s``, with an empty cache, and ``first_reply_cached_s``, the better of two.
    """
    with tempfile.TemporaryDirectory(prefix="ringmem-bench-") as cache:
        times = [_run(device, cache) for _ in range(3)]
    return {
        "first_reply_s": round(times[0], 4),
        "first_reply_cached_s": round(min(times[1:]), 4),
    }


def _run(device: Device, cache: str) -> float:
    environment = {**os.environ, "RINGMEM_CACHE": cache}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, device.name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RingmemError(f"the process of the first reply failed: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))
