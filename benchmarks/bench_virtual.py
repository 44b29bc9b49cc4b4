"""Virtual memory as Python sees it: growth, sharing, sleep and wake; the raw calls in the same run.

Runs on ``cpu`` and ``cuda``; sizes are smaller on the CPU. Figures below the level of a Python call
are ``tests/native/bench_mapping.cpp``'s.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from harness import Row, arguments, met, report, row

from ringmem import Device, empty, residency
from ringmem.native import _native
from ringmem.virtual import GrowableBuffer, SparseBuffer, set_recycle_limit

MIB, GIB = 2**20, 2**30


def us(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


class Raw:
    """The driver's own calls through its plain binding, in the same pattern."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.driver = device.driver
        location = _native.Location(_native.LocationKind.device, device.ordinal)
        self.props = _native.PhysicalProps(location, shareable=True)
        self.grants = [(location, _native.Access.readwrite)]
        self.nbytes = nbytes
        self.base = self.driver.address_reserve(nbytes)
        self.end = 0
        self.handles: list[int] = []

    def grow(self, sizes: list[int]) -> None:
        start = self.end
        for nbytes in sizes:
            handle = self.driver.mem_create(nbytes, self.props)
            self.driver.mem_map(self.base + self.end, nbytes, handle)
            self.handles.append(handle)
            self.end += nbytes
        self.driver.mem_set_access(self.base + start, self.end - start, self.grants)

    def close(self) -> None:
        self.driver.mem_unmap(self.base, self.end)
        for handle in self.handles:
            self.driver.mem_release(handle)
        self.driver.address_free(self.base, self.nbytes)


def small_growth(device: Device, steps: int) -> list[Row]:
    page = 2 * MIB
    buffer = GrowableBuffer(steps * page, device=device)
    raw = Raw(device, steps * page)
    ours, theirs = [], []
    for i in range(1, steps + 1):
        ours.append(us(lambda n=i * page: buffer.resize(n)))
        theirs.append(us(lambda: raw.grow([page])))
    buffer.close()
    raw.close()
    ahead = GrowableBuffer(2 * steps * page, device=device)
    ahead.reserve_ahead(64 * page)
    seen = []
    for i in range(1, steps + 1):
        if i % 16 == 1:
            ahead.settle()
        seen.append(us(lambda n=i * page: ahead.resize(n)))
    ahead.close()
    return [
        row("growth by 2 MiB", ours, "us"),
        row("growth by 2 MiB, raw calls", theirs, "us"),
        row("growth by 2 MiB, mapped ahead", seen, "us"),
    ]


def large_growth(device: Device, nbytes: int) -> list[Row]:
    ours, theirs, shrinks = [], [], []
    sizes: list[int] = []
    for _ in range(3):
        with GrowableBuffer(nbytes, device=device) as buffer:
            before = buffer.ptr
            ours.append(us(lambda b=buffer: b.resize(nbytes)))
            assert buffer.ptr == before
            sizes = [memory.nbytes for memory in buffer._core.memories()]
            shrinks.append(us(lambda b=buffer: b.resize(0)))
            buffer.settle()
        raw = Raw(device, nbytes)
        theirs.append(us(lambda r=raw, s=sizes: r.grow(s)))
        raw.close()
    what = f"growth to {nbytes / GIB:g} GiB"
    return [
        row(what, ours, "us", handles=len(sizes)),
        row(f"{what}, raw calls", theirs, "us"),
        row(f"shrink from {nbytes / GIB:g} GiB, as seen", shrinks, "us"),
    ]


def many_handles(device: Device) -> list[Row]:
    page = 2 * MIB
    rows = []
    with GrowableBuffer(
        10_600 * page, device=device, shareable=False, max_handle_nbytes=page
    ) as buffer:
        for handles in (10, 10_000):
            buffer.resize(handles * page)
            times = [
                us(lambda n=n: buffer.resize(n * page)) for n in range(handles + 1, handles + 300)
            ]
            rows.append(row(f"growth by 2 MiB with {handles} handles", times, "us"))
    return rows


def sparse(device: Device) -> list[Row]:
    rows = []
    for read_zero in (False, True):
        made, mapped, unmapped = [], [], []
        for _ in range(5):
            start = time.perf_counter_ns()
            buffer = SparseBuffer(512 * MIB, device=device, read_zero=read_zero, cache_nbytes=0)
            made.append((time.perf_counter_ns() - start) / 1e3)
            mapped.append(us(lambda b=buffer: b.map(range(64))) / 64)
            unmapped.append(us(lambda b=buffer: b.unmap(range(64))) / 64)
            buffer.settle()
            buffer.close()
        kind = "sparse, reads zero" if read_zero else "sparse"
        rows += [
            row(f"{kind}: made, 256 pages of 2 MiB", made, "us"),
            row(f"{kind}: map, a page in a run of 64", mapped, "us"),
            row(f"{kind}: unmap as seen, a page in a run of 64", unmapped, "us"),
        ]
    return rows


ATTACH = """
import json, pickle, sys, time
from ringmem.virtual import attach
tickets = pickle.load(sys.stdin.buffer)
attach(tickets.pop()).close()  # the driver is ready
times = []
for ticket in tickets:
    start = time.perf_counter_ns()
    shared = attach(ticket)
    times.append((time.perf_counter_ns() - start) / 1e3)
    shared.close()
print(json.dumps(times))
"""


def attaching(device: Device, nbytes: int) -> list[Row]:
    with GrowableBuffer(nbytes, device=device, shape=nbytes) as buffer:
        tickets = [buffer.share() for _ in range(6)]
        child = subprocess.run(
            [sys.executable, "-c", ATTACH],
            input=pickle.dumps(tickets),
            capture_output=True,
            check=True,
        )
        times = json.loads(child.stdout)
        name = f"attach {nbytes / GIB:g} GiB in another process"
        return [row(name, times, "us", handles=buffer.handles)]


def sleeping(device: Device, nbytes: int, discarded: int) -> list[Row]:
    rows = []
    tag = residency.tag("bench", "host", device)
    buffer = empty(nbytes, "uint8", device=device, allocator=tag)
    buffer.fill(7)
    device.synchronize()
    size = f"{nbytes / GIB:g} GiB"
    speed = {name: [] for name in ("first sleep", "sleep", "wake", "wake at once")}

    def cycle(sleep: str, wake: str) -> None:
        speed[sleep].append(nbytes / (us(tag.sleep) * 1e3))  # bytes a nanosecond are GB/s
        if wake == "wake":
            time.sleep(0.3)  # the driver clears what it was given back: 30 ms for 16 GiB on an H200
        speed[wake].append(nbytes / (us(tag.wake) * 1e3))

    for _ in range(3):
        cycle("first sleep", "wake")
        tag.drop_backup()
        time.sleep(2)  # until it is unpinned
    tag.sleep()
    tag.wake()
    for _ in range(5):
        cycle("sleep", "wake")
    for _ in range(5):
        cycle("sleep", "wake at once")
    bars = {"first sleep": 10, "sleep": 50, "wake": 50}
    for name, values in speed.items():
        seen = " ".join(f"{value:.1f}" for value in values)
        entry = row(f"{name} of {size}", values, "GB/s", each=seen)
        rows.append(met(entry, bars[name], least=True) if name in bars else entry)
    assert np.all(buffer[: 64 * MIB].to_numpy() == 7)
    assert np.all(buffer[-64 * MIB :].to_numpy() == 7)
    buffer.close()
    tag.close()
    tag = residency.tag("bench discard", "discard", device)
    parts = [
        empty(512 * MIB, "uint8", device=device, allocator=tag)
        for _ in range(discarded // (512 * MIB))
    ]
    for what, call in (("sleep", tag.sleep), ("wake", tag.wake)):
        name = f"{what} of {discarded / GIB:g} GiB without backup"
        rows.append(row(name, [us(call) / 1e3], "ms"))
    for part in parts:
        part.close()
    tag.close()
    return rows


def main() -> None:
    options = arguments(__doc__)
    device = Device(options.device)
    gpu = device.platform == "cuda"
    set_recycle_limit(0)
    rows = small_growth(device, 64 if options.quick else 256)
    rows += large_growth(device, 64 * GIB if gpu else 4 * GIB)
    rows += many_handles(device)
    rows += sparse(device)
    rows += attaching(device, 16 * GIB if gpu else GIB)
    rows += sleeping(device, 16 * GIB if gpu else GIB // 2, 64 * GIB if gpu else 4 * GIB)
    report("virtual", device, rows, options.json)


if __name__ == "__main__":
    main()
