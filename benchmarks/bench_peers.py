"""Two devices of one host: copies beside the driver's own, access, kernels, another process.

Needs two devices of a kind, and ends at once where there are none; ``--device cpu`` takes two
simulated ones. The peer is the driver's own call (``cuMemcpyPeerAsync`` of libcuda through ctypes;
for simulated devices the plain binding), sample by sample in turn with ours. Takes at most 40 s.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
from harness import Row, arguments, machine, row
from kernels import Kernels

import ringmem as rm
from ringmem.device.peer_copy import plan_copy
from ringmem.device.staging import Endpoint, staged_copy
from ringmem.virtual import AddressRange, GrowableBuffer, PhysicalMemory

MIB, GIB = 2**20, 2**30
LIMIT_S = 40.0
started = time.monotonic()
failures: list[object] = []


def left_s() -> float:
    return LIMIT_S - (time.monotonic() - started)


# --- the driver's own copy ------------------------------------------------------------------------


def raw_copy(dst: rm.Device, src: rm.Device) -> Callable[[int, int, int, rm.Stream], None]:
    """Return the driver's own peer copy, with nothing of ours around it."""
    driver = dst.driver
    if dst.platform != "cuda":
        return lambda to, at, nbytes, stream: driver.copy_peer_async(
            dst.ordinal, to, src.ordinal, at, nbytes, stream.handle
        )
    library = ctypes.CDLL("libcuda.so.1")
    call = library.cuMemcpyPeerAsync
    u64, pointer = ctypes.c_uint64, ctypes.c_void_p
    call.argtypes = [u64, pointer, u64, pointer, ctypes.c_size_t, pointer]
    contexts = [driver.primary_context(device.ordinal) for device in (dst, src)]
    assert library.cuCtxSetCurrent(pointer(contexts[0])) == 0

    def copy(to: int, at: int, nbytes: int, stream: rm.Stream) -> None:
        code = call(to, contexts[0], at, contexts[1], nbytes, stream.handle)
        if code:
            raise RuntimeError(f"cuMemcpyPeerAsync returned {code}")

    return copy


def gb_per_s(copy: Callable[[], object], stream: rm.Stream, nbytes: int, batch: int) -> float:
    start = time.perf_counter()
    for _ in range(batch):
        copy()
    stream.synchronize()
    return batch * nbytes / (time.perf_counter() - start) / 1e9


def copies(what: str, dst: rm.Device, src: rm.Device, to: int, at: int, nbytes: int) -> list[Row]:
    """Both ways of copying, in turn; each sample is a batch and one wait."""
    stream = dst.create_stream()
    raw = raw_copy(dst, src)
    batch, samples = max(1, min(16, 2 * GIB // nbytes)), 15
    ways: list[Callable[[], object]] = [
        lambda: rm.copy_peer(to, dst, at, src, nbytes, stream),
        lambda: raw(to, at, nbytes, stream),
    ]
    rates: list[list[float]] = [[], []]
    for i in range(-2, samples):
        for which in (0, 1) if i % 2 else (1, 0):
            rate = gb_per_s(ways[which], stream, nbytes, batch)
            if i >= 0:
                rates[which].append(rate)
        if left_s() < 10 and i >= 2:
            break
    name = f"{what}, {nbytes // MIB} MiB"
    of_driver = float(np.median(rates[0]) / np.median(rates[1]))
    return [
        row(f"{name}, ringmem", rates[0], "GB/s", of_driver=of_driver),
        row(f"{name}, driver", rates[1], "GB/s"),
    ]


# --- the parts ------------------------------------------------------------------------------------


def matrix(devices: list[rm.Device]) -> bool:
    found = rm.peer_matrix(devices)
    for device, can in zip(found.devices, found.can_access, strict=True):
        reach = ", ".join(p.name for p, yes in zip(found.devices, can, strict=True) if yes)
        print(f"{device.name} {device.product_name}: reaches {reach}")
    return all(all(can) for can in found.can_access)


def pool_copies(a: rm.Device, b: rm.Device, sizes: list[int], check: list[Kernels]) -> list[Row]:
    """Ordinary buffers, with peer access switched on both ways."""
    rows = []
    largest = sizes[-1]
    with rm.DeviceBuffer(largest, device=a) as src, rm.DeviceBuffer(largest, device=b) as dst:
        a.default_stream.synchronize()
        b.default_stream.synchronize()
        check[0].write(src.ptr, largest, 1)
        for one, other in ((a, b), (b, a)):
            rm.enable_peer_access(one, other)
        for nbytes in sizes:
            check[1].write(dst.ptr, nbytes, 99)
            rows += copies("copy", b, a, dst.ptr, src.ptr, nbytes)
            assert check[1].wrong(dst.ptr, nbytes, 1) == 0
        dst.fill(0)
        dst.copy_from(src)  # the call that users make
        b.default_stream.synchronize()
        dst.stream.synchronize()
        assert check[1].wrong(dst.ptr, largest, 1) == 0
    return rows


def virtual_memory(a: rm.Device, b: rm.Device, nbytes: int, check: list[Kernels]) -> list[Row]:
    """Access for both devices in one call; each writes and reads the other's memory by kernel."""
    both = {a: "readwrite", b: "readwrite"}
    memory = PhysicalMemory.create(a, nbytes)
    addresses = AddressRange.reserve(a, nbytes)
    mapped = addresses.map(memory)
    start = time.perf_counter()
    mapped.set_access(both)
    access_us = (time.perf_counter() - start) * 1e6
    rows = [row(f"access for two devices, {nbytes // MIB} MiB", [access_us], "us")]
    assert [mapped.get_access(device) for device in (a, b)] == ["readwrite", "readwrite"]
    for writer, reader, seed in ((0, 1, 5), (1, 0, 6), (1, 1, 7), (0, 0, 8)):
        check[writer].write(mapped.ptr, nbytes, seed)
        assert check[reader].wrong(mapped.ptr, nbytes, seed) == 0
    with GrowableBuffer(2 * nbytes, device=b, access=both, shape=nbytes) as grown:
        rows += copies("copy, virtual", b, a, grown.ptr, mapped.ptr, nbytes)
        assert check[0].wrong(grown.ptr, nbytes, 8) == 0  # a reads the memory of b
        grown.resize(2 * nbytes)  # what grows later has the same access
        check[0].write(grown.ptr, 2 * nbytes, 9)
        assert check[1].wrong(grown.ptr, 2 * nbytes, 9) == 0
    mapped.unmap([])
    memory.close()
    addresses.close()
    print("kernels of both devices wrote and read the memory of each other: right")
    return rows


def without_access(a: rm.Device, b: rm.Device, nbytes: int, check: list[Kernels]) -> list[Row]:
    """Copies between memory that only its own device may access: the driver finds a way."""
    rows = []
    for one, other in ((a, b), (b, a)):
        rm.disable_peer_access(one, other)
    with rm.DeviceBuffer(nbytes, device=a) as src, rm.DeviceBuffer(nbytes, device=b) as dst:
        a.default_stream.synchronize()
        b.default_stream.synchronize()
        check[0].write(src.ptr, nbytes, 31)
        rows += copies("copy, access off", b, a, dst.ptr, src.ptr, nbytes)
        assert check[1].wrong(dst.ptr, nbytes, 31) == 0
    with (
        GrowableBuffer(nbytes, device=a, shape=nbytes) as mine,
        GrowableBuffer(nbytes, device=b, shape=nbytes) as theirs,
    ):
        check[0].write(mine.ptr, nbytes, 32)
        rows += copies("copy, virtual, no access", b, a, theirs.ptr, mine.ptr, nbytes)
        assert check[1].wrong(theirs.ptr, nbytes, 32) == 0
    return rows


ATTACH = """
import json, pickle, sys, time
import ringmem
sys.path.insert(0, sys.argv[1])
from kernels import Kernels
from ringmem.virtual import attach
device = ringmem.Device(sys.argv[2])
check = Kernels(device)
warm, ticket, nbytes = pickle.load(sys.stdin.buffer)
attach(warm, device).close()
start = time.perf_counter_ns()
shared = attach(ticket, device)
took = (time.perf_counter_ns() - start) / 1e3
assert check.wrong(shared.ptr, nbytes, 11) == 0
check.write(shared.ptr, nbytes, 12)
shared.close()
print(json.dumps(took))
"""


def another_process(a: rm.Device, b: rm.Device, nbytes: int, check: list[Kernels]) -> list[Row]:
    """Memory of a, attached by another process for b alone, read and written by kernels of b."""
    with GrowableBuffer(nbytes, device=a, shape=nbytes) as buffer:
        check[0].write(buffer.ptr, nbytes, 11)
        message = pickle.dumps((buffer.share(), buffer.share(), nbytes))
        child = subprocess.run(
            [sys.executable, "-c", ATTACH, str(Path(__file__).parent), b.name],
            input=message,
            capture_output=True,
            timeout=max(left_s(), 5),
        )
        if child.returncode:
            raise RuntimeError(child.stderr.decode()[-2000:])
        assert check[0].wrong(buffer.ptr, nbytes, 12) == 0
        name = f"attach {nbytes // MIB} MiB of {a.name} in another process on {b.name}"
        return [row(name, [json.loads(child.stdout)], "us", handles=buffer.handles)]


def staged(a: rm.Device, b: rm.Device, nbytes: int, check: list[Kernels]) -> list[Row]:
    """What devices without a link get: through pinned chunks of the host."""
    plan = plan_copy(b.name, a.name, nbytes, linked=False, same_driver=True)
    stream = b.create_stream()
    with rm.DeviceBuffer(nbytes, device=a) as src, rm.DeviceBuffer(nbytes, device=b) as dst:
        a.default_stream.synchronize()
        b.default_stream.synchronize()
        check[0].write(src.ptr, nbytes, 21)
        ends = Endpoint(b, dst.ptr), Endpoint(a, src.ptr)
        rates = [
            gb_per_s(lambda: staged_copy(*ends, plan.chunks, stream), stream, nbytes, 1)
            for _ in range(4)
        ]
        assert check[1].wrong(dst.ptr, nbytes, 21) == 0
    return [row(f"copy through the host, {nbytes // MIB} MiB", rates[1:], "GB/s")]


def attempt(part: Callable[[], list[Row]]) -> list[Row]:
    """One part that fails says so, and the others are measured all the same."""
    try:
        return part()
    except Exception:
        traceback.print_exc(limit=-3)
        failures.append(part)
        return []


def measure(a: rm.Device, b: rm.Device) -> list[Row]:
    gpu = a.platform == "cuda"
    sizes = [16 * MIB, GIB if gpu else 64 * MIB]
    check = [Kernels(a), Kernels(b)]
    if not matrix([a, b]):
        print("there is no direct link: copies go through the host")
        return staged(a, b, sizes[0], check)
    rows = attempt(lambda: pool_copies(a, b, sizes, check))
    rows += attempt(lambda: virtual_memory(a, b, sizes[1], check))
    rows += attempt(lambda: another_process(a, b, sizes[1], check))
    rows += attempt(lambda: staged(a, b, sizes[1] // 4, check))
    # Last: should the driver fault, the context is lost.
    rows += attempt(lambda: without_access(a, b, sizes[0], check))
    return rows


def main() -> int:
    options = arguments(__doc__)
    kind = (options.device or "").split(":")[0]
    if kind == "cpu":
        os.environ.setdefault("RINGMEM_SIMULATE", "devices=2,capacity=8GiB")
    found = rm.devices(kind or "cuda")
    if len(found) < 2:
        print(f"there are {len(found)} devices: two are needed")
    rows = measure(*found[:2]) if len(found) > 1 else []
    for entry in rows:
        ratio = (
            f"  {100 * entry['of_driver']:.1f} % of the driver's" if "of_driver" in entry else ""
        )
        print(f"{entry['name']:<52} {entry['median']:>9.1f} {entry['unit']}{ratio}")
    print(f"{time.monotonic() - started:.1f} s")
    if options.json:
        device = found[0] if found else rm.Device("cpu")
        result = {"benchmark": "peers", "machine": machine(device), "rows": rows}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
