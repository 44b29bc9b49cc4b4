"""A replay at 1.05, 1.02 and 1.01 times the peak of what lives, beside one without a limit.

Usage: ``python benchmarks/bench_pool_limit.py TRACE.npz… [--device cpu] [--late N]``. Prints the
time in the allocator, driver calls included, of the first repetition and of both (medians of five
rounds), the handles moved and the time that took. Takes a few seconds a trace.
"""

import argparse
import statistics

from ringmem.cli.replay import ReplaySettings, run_replay
from ringmem.observe import Trace

ROUNDS = 5


def measure(trace, capacity, device, late):
    """Milliseconds of the two repetitions, and the last result."""
    settings = ReplaySettings(trace, device=device, capacity=capacity, late=late, repetitions=2)
    times, result = [], None
    for _ in range(ROUNDS):
        result = run_replay(settings)
        if not result["completed"]:
            return None, result
        times.append([one["seconds"] * 1e3 for one in result["repetitions"]])
    return [statistics.median(column) for column in zip(*times, strict=True)], result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--device")
    parser.add_argument("--late", type=int, default=0)
    arguments = parser.parse_args()
    for path in arguments.traces:
        trace = Trace.load(path)
        free = None
        for ratio in (None, 1.05, 1.02, 1.01):
            capacity = None if ratio is None else int(trace.peak_live_bytes * ratio)
            times, result = measure(trace, capacity, arguments.device, arguments.late)
            label = f"{trace.name:18s} {'no limit' if ratio is None else ratio!s:>8s}"
            if times is None:
                print(f"{label}  out of memory at event {result['failed_event']}")
                continue
            free = free or times
            print(
                f"{label}  first {times[0]:7.1f} ms ({times[0] / free[0]:.2f} x)"
                f"  both {sum(times):7.1f} ms ({sum(times) / sum(free):.2f} x)"
                f"  calls {result['repetitions'][0]['driver_calls']}"
                f" + {result['repetitions'][1]['driver_calls']}"
                f"  remaps {result['remaps']} in {result['remap_seconds'] * 1e3:.1f} ms"
                f"  reserved/live {result['reserved_over_live']:.4f}"
            )


if __name__ == "__main__":
    main()
