"""A ring kernel: round trips, throughput, handlers, first replies, and the other ways to ask a GPU.

Every word of every reply is verified. The same figures as ``ringmem bench ring``, with their bars.
"""

from __future__ import annotations

from typing import Any

import harness
from harness import Row, met, row

import ringmem as rm
from ringmem.cli import bench_ring

RINGS = 8  # of the figure for all rings together
BARS = {  # name: on a GPU, on the CPU device; None: published without a bar
    "round trip, native, p50": (2.0, 1.0),
    "round trip, native, p99": (3.2, None),
    "round trip, kernel.call, p50": (2.8, None),
    "batches of 512, Python": (60.0, None),
    "batches of 512, native": (None, 50.0),
    "all rings together": (200.0, None),
    "Python handler against CUDA C++": (0.95, None),
    "asyncio, 1000 tasks": (1.0, None),
    "first reply, cached": (50.0, None),
    "first reply, not cached": (1500.0, None),
}


def rows_of(result: dict[str, Any], gpu: bool) -> list[Row]:
    rows = []

    def add(name: str, value: float, unit: str, *, least: bool = False, **more: Any) -> None:
        bar = BARS.get(name, (None, None))[0 if gpu else 1]
        entry = row(name, [value], unit, **more)
        rows.append(entry if bar is None else met(entry, bar, least=least))

    for nbytes, us in result["rtt_us"].items():
        more = "" if nbytes == "56" else f" ({nbytes} B)"
        for quantile in ("p50", "p99", "p99.9"):
            add(f"round trip, native, {quantile}{more}", us[quantile], "us")
    for quantile in ("p50", "p99"):
        add(f"round trip, kernel.call, {quantile}", result["python_call_us"][quantile], "us")
    million = 1e6
    for nbytes, rates in result["messages_per_second"].items():
        more = "" if nbytes == "56" else f" ({nbytes} B)"
        for batch, rate in rates.items():
            add(f"batches of {batch}, native{more}", rate / million, "M/s", least=True)
    add(
        "batches of 512, Python",
        result["python_batch"]["messages_per_second"] / million,
        "M/s",
        least=True,
    )
    if "all_rings" in result:
        together = result["all_rings"]
        add(
            "all rings together",
            together["messages_per_second"] / million,
            "M/s",
            least=True,
            rings=together["rings"],
        )
    handler = result["python_handler"]
    add("Python handler against CUDA C++", handler["ratio"], "of it", least=True)
    add("first reply, cached", handler["first_reply_cached_s"] * 1e3, "ms")
    add("first reply, not cached", handler["first_reply_s"] * 1e3, "ms")
    for tasks, found in result["asyncio"].items():
        name = "asyncio, 1 task" if tasks == "1" else f"asyncio, {tasks} tasks"
        add(
            name,
            found["messages_per_second"] / million,
            "M/s",
            least=True,
            rtt_us_p50=found["rtt_us"]["p50"],
        )
    add("idle, share of a host core", result["idle_core_share"], "of one")
    if "multiprocessors" in result:
        add("idle, multiprocessors", result["multiprocessors"], "of one")
    for name, found in result["compared"].items():
        if "rtt_us_p50" in found:
            add(f"{name}, p50", found["rtt_us_p50"], "us", rtt_us_p99=found["rtt_us_p99"])
    return rows


def main() -> None:
    options = harness.arguments(__doc__)
    device = rm.Device(options.device)
    gpu = device.platform == "cuda"
    messages = 200_000 if options.quick else 2_000_000
    result = bench_ring.run(device.name, messages, RINGS if gpu else 1)
    if not result["verified"]:
        raise SystemExit(f"{result['wrong_words']} words were wrong")
    harness.report("ring", device, rows_of(result, gpu), options.json)


if __name__ == "__main__":
    main()
