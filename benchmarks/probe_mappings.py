"""How many live mappings the driver takes, and what they cost: the bound that issue and docs name.

    python benchmarks/probe_mappings.py [--device cuda:0] [--most 1000000] [--seconds 25]

One handle is mapped at address after address, with access, until the driver refuses, the number is
reached or the time is up. Then memory is unmapped, and the device must be as before.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import ringmem as rm
from ringmem import DriverError
from ringmem.native import _native

BATCH = 4096  # mappings of an access call


def process() -> str:
    """What mappings cost the host: memory areas of the kernel and resident bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    areas = Path("/proc/self/maps").read_text().count("\n")
    return f"{areas} areas, {int(status['VmRSS'].split()[0]) // 1024} MiB resident"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=None)
    parser.add_argument("--most", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=25)
    options = parser.parse_args()
    device = rm.Device(options.device)
    driver = device.driver
    location = _native.Location(_native.LocationKind.device, device.ordinal)
    grants = [(location, _native.Access.readwrite)]
    page = device.granularity
    handle = driver.mem_create(page, _native.PhysicalProps(location))
    base = driver.address_reserve(options.most * page)
    free = device.memory_info().free
    count, shown, refused = 0, 0, "nothing was refused"
    started = last = time.monotonic()
    print(f"{device.product_name}: {process()}, pages of {page >> 10} KiB")
    try:
        while count < options.most and time.monotonic() - started < options.seconds:
            first = count
            for _ in range(min(BATCH, options.most - count)):
                driver.mem_map(base + count * page, page, handle)
                count += 1
            driver.mem_set_access(base + first * page, (count - first) * page, grants)
            if count >= 2 * shown or count == options.most:
                now = time.monotonic()
                print(
                    f"{count:>9} mappings: {1e6 * (now - last) / (count - shown):6.1f} us each, "
                    f"{process()}, {(free - device.memory_info().free) >> 20} MiB of the device",
                    flush=True,
                )
                shown, last = count, time.monotonic()
    except DriverError as error:
        refused = f"{error.operation}: {error.name}"
    print(f"{count} mappings after {time.monotonic() - started:.1f} s: {refused}")
    start = time.monotonic()
    driver.mem_unmap(base, count * page)
    driver.mem_release(handle)
    driver.address_free(base, options.most * page)
    print(f"unmapped in {time.monotonic() - start:.2f} s, {process()}")


if __name__ == "__main__":
    main()
