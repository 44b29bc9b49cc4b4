"""Content that the device itself writes and checks, through growth, shrink, remapping and sharing.

On the CPU and on a GPU alike; on a GPU by kernels, so that nothing hides behind the host's copies.
"""

import pytest

import ringmem
from ringmem.virtual import (
    AddressRange,
    GrowableBuffer,
    PhysicalMemory,
    SparseBuffer,
    attach,
)

MIB = 2**20


@pytest.fixture
def device(own_device):
    return own_device


@pytest.fixture
def check(kernels, device):
    return kernels(device)


@pytest.mark.parametrize("ahead", [0, 32 * MIB])
def test_growth_and_shrink_keep_what_a_kernel_wrote(device, check, ahead):
    with GrowableBuffer(512 * MIB, "uint8", device) as buffer:
        buffer.reserve_ahead(ahead)
        at = buffer.ptr
        sizes = [2 * MIB, 3 * MIB, 64 * MIB, 70 * MIB, 300 * MIB]
        for seed, nbytes in enumerate(sizes):
            before = buffer.nbytes
            buffer.resize(nbytes)
            if before:
                assert check.wrong(at, before, seed - 1) == 0
            check.write(at, nbytes, seed)
            assert check.wrong(at, nbytes, seed) == 0
        last = len(sizes) - 1
        for nbytes in (299 * MIB, 100 * MIB, 5 * MIB):
            buffer.resize(nbytes, streams=check.stream)
            buffer.settle()
            assert check.wrong(at, nbytes, last) == 0
        buffer.resize(200 * MIB)
        assert check.wrong(at, 5 * MIB, last) == 0
        check.write(at, 200 * MIB, 99)
        assert check.wrong(at, 200 * MIB, 99) == 0
        assert buffer.ptr == at


def test_a_shrink_waits_for_the_kernel_that_still_writes(device, check):
    """The kernel is submitted, not waited for; its pages go after it."""
    with GrowableBuffer(512 * MIB, "uint8", device, shape=256 * MIB) as buffer:
        check.write(buffer.ptr, 256 * MIB, 0)
        for seed in range(1, 6):
            if device.platform == "cuda":
                check.submit_write(buffer.ptr, 256 * MIB, seed)
            else:
                buffer.fill(seed, stream=check.stream)
            buffer.resize(8 * MIB, streams=check.stream)
            buffer.settle()
            if device.platform == "cuda":
                assert check.wrong(buffer.ptr, 8 * MIB, seed) == 0
            buffer.resize(256 * MIB)
        check.stream.synchronize()


def test_memory_keeps_its_content_from_one_address_to_another(device, check):
    memory = PhysicalMemory.create(device, 16 * MIB)
    first = AddressRange.reserve(device, memory.nbytes)
    second = AddressRange.reserve(device, 3 * memory.nbytes)
    mapping = first.map(memory)
    check.write(mapping.ptr, memory.nbytes, 1)
    mapping.unmap(check.stream)
    for seed, offset in enumerate((0, 2 * memory.nbytes, memory.nbytes), start=1):
        mapping = second.map(memory, offset)
        assert check.wrong(mapping.ptr, memory.nbytes, seed) == 0
        alias = first.map(memory)
        check.write(alias.ptr, memory.nbytes, seed + 1)
        assert check.wrong(mapping.ptr, memory.nbytes, seed + 1) == 0
        alias.unmap(check.stream)
        mapping.unmap(check.stream)
    memory.close()
    first.close()
    second.close()


@pytest.mark.parametrize("read_zero", [False, True])
def test_pages_keep_their_content_while_others_come_and_go(device, check, read_zero):
    with SparseBuffer(64 * MIB, "uint8", device, read_zero=read_zero) as buffer:
        page = buffer.page_nbytes
        at = [buffer.ptr + number * page for number in range(buffer.page_count)]
        buffer.map(range(16))
        for number in range(16):
            check.write(at[number], page, number)
        buffer.unmap(range(4, 8), streams=check.stream)
        buffer.settle()
        buffer.map([4, 6, 20])
        for number in (4, 6, 20):
            check.write(at[number], page, 100 + number)
        for number in (*range(4), *range(8, 16)):
            assert check.wrong(at[number], page, number) == 0
        for number in (4, 6, 20):
            assert check.wrong(at[number], page, 100 + number) == 0
        buffer.unmap([0, 1, 2, 3, 4, 20], streams=check.stream)
        buffer.map([1, 2])
        for number in (1, 2):
            check.write(at[number], page, 200 + number)
        for number in (6, *range(8, 16)):
            assert check.wrong(at[number], page, number + 100 * (number == 6)) == 0


def test_an_attachment_reads_what_the_kernel_wrote_and_back(device, check):
    with GrowableBuffer(128 * MIB, "uint8", device, shape=60 * MIB) as buffer:
        check.write(buffer.ptr, buffer.nbytes, 1)
        with attach(buffer.share(), device) as shared:
            assert shared.ptr != buffer.ptr
            assert check.wrong(shared.ptr, shared.nbytes, 1) == 0
            check.write(shared.ptr, shared.nbytes, 2)
            shared.close(check.stream)
        assert check.wrong(buffer.ptr, buffer.nbytes, 2) == 0


def test_recycled_pages_hold_nothing_of_their_last_tenant(device, check):
    before = ringmem.virtual.recycle_limit()
    ringmem.virtual.set_recycle_limit(64 * MIB)
    try:
        with GrowableBuffer(
            32 * MIB, device=device, shape=32 * MIB, max_handle_nbytes=2 * MIB, shareable=False
        ) as buffer:
            check.write(buffer.ptr, buffer.nbytes, 5)
            buffer.resize(0, streams=check.stream)
            buffer.settle()
            with GrowableBuffer(
                32 * MIB, device=device, shape=32 * MIB, max_handle_nbytes=2 * MIB, shareable=False
            ) as other:
                assert not other.view().to_numpy().any()
    finally:
        ringmem.virtual.set_recycle_limit(before)
