"""Round trips with 0, 1, 2, 3 and 7 idle workers that look for the next message too (CUDA).

    python benchmarks/ring_scouts.py --device cuda:0

Natively back to back, and through Python's `kernel.call`. Prints one line for each number; the
default is `ringmem.ring.cuda_build.SCOUTS`. Takes some seconds, most of them to compile.
"""

from __future__ import annotations

import argparse

from ringmem.cli.bench_ring import _Bench, _quantiles
from ringmem.device import Device
from ringmem.ring import cuda_build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    device = Device(parser.parse_args().device)
    bench = _Bench(device, 2_000_000, 1)
    for scouts in (0, 1, 2, 3, 7):
        cuda_build.SCOUTS = scouts
        with bench._kernel(56) as kernel:
            bench._round_trips(kernel, 2_000)
            native = _quantiles(bench._round_trips(kernel, 20_000))
            python = bench._calls(kernel)
            rate = bench._stream(kernel, 512)
        print(f"scouts={scouts} native={native} call={python} batch 512: {rate / 1e6:.1f} M/s")
    print(f"wrong words: {bench.wrong_words}")


if __name__ == "__main__":
    main()
