"""A program with a ring kernel, for tests that kill it or stop it. Usage: a_kernel.py DEVICE ISOLATED.

Prints a line when the first reply has come, then streams until something ends it; prints how.
"""

from __future__ import annotations

import sys

import handlers_for_tests as h
import numpy as np

from ringmem import RingKernel


def main(device: str, isolated: bool) -> None:
    kernel = RingKernel(
        h.add,
        message=h.PAIR,
        reply=h.TOTAL,
        device=device,
        isolated=isolated,
        heartbeat_timeout_s=0.4,
        deadline_s=60.0,
    )
    with kernel:
        kernel.call((1, 2), timeout_s=20)
        child = kernel._backend._process.pid if isolated else 0
        print(child, flush=True)
        batch = np.zeros(64, h.PAIR)
        try:
            while True:
                kernel.send(batch, timeout_s=20)
                kernel.recv(timeout_s=20)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "isolated")
