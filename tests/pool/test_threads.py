"""Pools from all threads at once: nothing lost, nothing freed twice, figures that add up."""

import contextlib
import random

import pytest

import ringmem
from ringmem.native.errors import (
    ClosedError,
    DoubleFreeError,
    InvalidValueError,
    OutOfMemoryError,
)
from ringmem.pool import NativePool, PinnedPool, Pool, UnifiedPool

MIB = 1 << 20
SIZES = (32, 1000, 4096, 33_000, 300_000, 3 * MIB)
KINDS = [Pool, lambda device: Pool(device, debug=True), NativePool, PinnedPool, UnifiedPool]
NAMES = ["pool", "debug", "driver", "pinned", "unified"]


class Worker:
    """Allocates, uses and gives back, each block in one of the ways there are."""

    def __init__(self, pool, device, seed):
        self.pool, self.random, self.seed = pool, random.Random(seed), seed
        self.stream, self.other = device.create_stream(), device.create_stream()
        self.blocks, self.made = [], 0

    def __call__(self, number):
        nbytes = self.random.choice(SIZES)
        if number % 16 == 0:
            with self.pool.empty(nbytes, stream=self.stream) as buffer:
                buffer.fill(self.seed)
                assert (buffer.to_numpy() == self.seed).all()
            self.made += 1
        self.blocks.append(self.pool.allocate(nbytes, self.stream))
        self.made += 1
        if number % 3 == 0:
            self.blocks[-1].record_stream(self.other)
        while len(self.blocks) > 12:
            block = self.blocks.pop(self.random.randrange(12))
            if number % 2:
                block.close(self.other if number % 4 == 1 else None)
            del block


@pytest.mark.parametrize("policy", ["best_fit", "power_of_two"])
def test_one_pool_serves_all_threads_while_its_limits_and_figures_change(faulty, hammer, policy):
    device = ringmem.devices_of(faulty)[0]
    pool = Pool(device, policy=policy)
    workers = [Worker(pool, device, seed) for seed in range(1, 5)]

    def govern(number):
        figures = pool.statistics()
        assert 0 <= figures.live < 1000
        assert figures.peak_requested >= figures.requested
        pool.reset_peaks()
        pool.trim(number % 3 * MIB)
        pool.limit = None if number % 2 else 200 * MIB
        pool.release_threshold = None if number % 5 else 8 * MIB
        with pool.statistics() as inner:
            pool.allocate(5000).close()
        assert inner.allocations >= 1
        assert inner.peak_requested >= 5000
        governed.append(number)

    governed = []
    with pool.statistics() as region:
        assert hammer.repeat(*workers, govern) == []
        for worker in workers:
            worker.blocks.clear()
    made = sum(worker.made for worker in workers) + len(governed)
    assert (region.allocations, region.frees) == (made, made)
    assert (pool.statistics().live, pool.inconsistency()) == (0, "")
    pool.close()


@pytest.mark.parametrize("make", KINDS, ids=NAMES)
def test_an_allocation_that_many_threads_close_is_freed_once(faulty, hammer, make):
    device = ringmem.devices_of(faulty)[0]
    pool = make(device)
    stream, other = device.create_stream(), device.create_stream()
    blocks = []

    def record():
        for block in blocks:
            with contextlib.suppress(ClosedError):
                block.record_stream(other)

    def look():
        for block in blocks:
            with contextlib.suppress(ClosedError):
                assert block.ptr
            assert block.nbytes == 1000
            assert "Allocation of 1000 bytes" in repr(block)

    for _ in range(12):
        blocks[:] = [pool.allocate(1000, stream) for _ in range(60)]
        failures = hammer.together(
            lambda: [block.close() for block in blocks],
            lambda: [block.close(other) for block in reversed(blocks)],
            record,
            look,
        )
        assert failures == []
        assert all(block.closed for block in blocks)
    figures = pool.statistics()
    live = figures.live if hasattr(figures, "live") else pool.live
    assert live == 0
    if hasattr(figures, "frees"):
        assert (figures.allocations, figures.frees) == (720, 720)
    if make is Pool:
        assert pool.inconsistency() == ""
    blocks.clear()
    pool.close() if hasattr(pool, "close") else pool.destroy()


def test_an_address_that_many_threads_free_is_freed_once(faulty, hammer):
    pool = Pool(ringmem.devices_of(faulty)[0])

    def free(pointers):
        def body():
            for ptr in pointers:
                try:
                    pool.deallocate(ptr)
                except DoubleFreeError:
                    refused.append(ptr)

        return body

    for _ in range(10):
        refused = []
        pointers = [pool.allocate_ptr(1000) for _ in range(100)]
        assert hammer.together(*(free(pointers) for _ in range(4))) == []
        assert len(refused) == 300
    assert (pool.statistics().frees, pool.statistics().live) == (1000, 0)
    assert pool.inconsistency() == ""
    pool.close()


def test_callbacks_come_and_go_while_memory_is_out(faulty, hammer):
    device = ringmem.devices_of(faulty)[0]
    pool = Pool(device, limit=8 * MIB)
    held = [pool.allocate(3 * MIB) for _ in range(2)]

    def want(number):
        with pytest.raises(OutOfMemoryError) as caught:
            pool.allocate(7 * MIB)
        assert caught.value.requested == 7 * MIB

    def come_and_go(number):
        pool.add_out_of_memory_callback(lambda requested, figures: False)()

    assert hammer.repeat(want, want, come_and_go, come_and_go) == []
    del held
    assert pool.statistics().live == 0
    pool.close()


def test_a_pool_that_is_closed_meanwhile_refuses_and_loses_nothing(faulty, hammer):
    device = ringmem.devices_of(faulty)[0]
    for _ in range(20):
        pool = Pool(device)

        def use(pool=pool):
            with contextlib.suppress(ClosedError):
                for _ in range(50):
                    pool.allocate(4096).close()

        def close(pool=pool):
            while not pool.closed:
                with contextlib.suppress(InvalidValueError):
                    pool.close()

        assert hammer.together(use, use, use, close) == []
        assert pool.statistics().live == 0
