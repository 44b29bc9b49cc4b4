"""What the other process of the sharing tests does: imports what comes as a descriptor, finds the
value that was written there, writes another.

    peer_process.py <host|cuda> <memory|pool> <nbytes> <expected> <written> [<export>] <fd>…
"""

from __future__ import annotations

import ctypes
import sys

from ringmem.native import _native as native


def exchange(driver: native.Driver, ptr: int, nbytes: int, expected: int, written: int) -> None:
    staging = driver.host_alloc(0, nbytes)
    driver.copy_async(0, staging, ptr, nbytes)
    driver.stream_synchronize(0, 0)
    found = ctypes.string_at(staging, nbytes)
    assert found == bytes([expected]) * nbytes, f"found {found[:8]!r}, expected {expected}"
    driver.fill_async(0, ptr, written, 1, nbytes)
    driver.stream_synchronize(0, 0)


def memory(driver: native.Driver, fds: list[int], nbytes: int, expected: int, written: int) -> None:
    """Maps all handles in one range; each has `nbytes`."""
    total = nbytes * len(fds)
    base = driver.address_reserve(total)
    for index, fd in enumerate(fds):
        handle = driver.mem_import(fd)
        driver.mem_map(base + index * nbytes, nbytes, handle)
        driver.mem_release(handle)
    driver.mem_set_access(base, total, [(native.Location(), native.Access.readwrite)])
    exchange(driver, base, total, expected, written)
    driver.mem_unmap(base, total)
    driver.address_free(base, total)


def pool(
    driver: native.Driver, fd: int, nbytes: int, expected: int, written: int, export: str
) -> None:
    imported = driver.pool_import(0, fd)
    driver.pool_set_access(0, imported, [(native.Location(), native.Access.readwrite)])
    ptr = driver.pool_import_pointer(0, imported, bytes.fromhex(export))
    exchange(driver, ptr, nbytes, expected, written)
    driver.mem_free_async(0, ptr)
    driver.synchronize(0)
    driver.pool_destroy(0, imported)


def main(kind: str, what: str, *rest: str) -> None:
    driver = native.cuda_driver() if kind == "cuda" else native.HostDriver("devices=2")
    nbytes, expected, written = (int(text) for text in rest[:3])
    if what == "pool":
        pool(driver, int(rest[4]), nbytes, expected, written, rest[3])
    else:
        memory(driver, [int(text) for text in rest[3:]], nbytes, expected, written)


if __name__ == "__main__":
    main(*sys.argv[1:])
