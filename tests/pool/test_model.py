"""The pool against a simple reference: at least 10**5 operations a run on every policy."""

import bisect
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ringmem
from ringmem import Pool

OPERATIONS = 2500
EXAMPLES = 41  # of each policy: 10**5 operations
MIB = 1 << 20


class Reference:
    """What lives, by address; nothing may overlap."""

    def __init__(self):
        self.starts, self.ends, self.blocks = [], [], []
        self.requested = self.allocations = self.frees = 0

    def add(self, block):
        start, end = block.ptr, block.ptr + block.nbytes
        at = bisect.bisect_left(self.starts, start)
        assert at == 0 or self.ends[at - 1] <= start, "overlaps the block before"
        assert at == len(self.starts) or end <= self.starts[at], "overlaps the block after"
        self.starts.insert(at, start)
        self.ends.insert(at, end)
        self.blocks.append(block)
        self.requested += block.nbytes
        self.allocations += 1

    def take(self, index):
        self.blocks[index], self.blocks[-1] = self.blocks[-1], self.blocks[index]
        block = self.blocks.pop()
        at = bisect.bisect_left(self.starts, block.ptr)
        del self.starts[at], self.ends[at]
        self.requested -= block.nbytes
        self.frees += 1
        return block


def check(pool, reference, limit):
    s = pool.statistics()
    assert (s.live, s.requested) == (len(reference.blocks), reference.requested)
    assert (s.allocations, s.frees) == (reference.allocations, reference.frees)
    assert s.requested <= s.allocated <= s.reserved
    assert s.peak_requested >= s.requested
    assert limit is None or s.reserved <= limit
    assert pool.inconsistency() == ""


SHAPES = {
    "log": lambda r: int(2 ** r.uniform(0, 22)),
    "small": lambda r: r.randint(1, 40_000),
    "powers": lambda r: 1 << r.randint(0, 21),
    "primes": lambda r: r.choice((257, 8191, 65_537, 524_287, 2_097_143)),
    "few": lambda r: r.choice((512, 4096, MIB, 3 * MIB)),
}


def play(pool, streams, rng, size_of, most_live, limit):
    reference = Reference()
    for number in range(OPERATIONS):
        grow = len(reference.blocks) < most_live * (0.5 + 0.5 * ((number // 500) % 2))
        if not reference.blocks or rng.random() < (0.65 if grow else 0.35):
            try:
                reference.add(pool.allocate(size_of(rng), rng.choice(streams)))
            except ringmem.OutOfMemoryError:
                assert limit is not None
                while reference.requested > limit // 4:
                    reference.take(-1).close()
        else:
            block = reference.take(rng.randrange(len(reference.blocks)))
            how = rng.random()
            if how < 0.6:
                block.close()
            elif how < 0.9:
                block.close(rng.choice(streams))
            else:
                block.record_stream(rng.choice(streams))
                del block
        if number % 250 == 0:
            check(pool, reference, limit)
        if number % 600 == 599:
            pool.trim(rng.choice((0, 4 * MIB, 1 << 40)))
    check(pool, reference, limit)
    while reference.blocks:
        reference.take(-1).close()
    check(pool, reference, limit)


@pytest.mark.parametrize("policy", ["best_fit", "power_of_two", "exact"])
def test_the_pool_is_what_the_reference_is(policy):
    with ringmem.simulate(capacity="8 GiB") as simulation:
        device = simulation.devices[0]
        streams = [device.create_stream() for _ in range(4)]

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            seed=st.integers(0, 2**32),
            shape=st.sampled_from(sorted(SHAPES)),
            count=st.integers(1, 4),
            most_live=st.sampled_from((4, 40, 300)),
            limit=st.sampled_from((None, None, 64 * MIB)),
            tight=st.booleans(),
        )
        def run(seed, shape, count, most_live, limit, tight):
            with Pool(device, policy=policy, limit=limit, tight=tight) as pool:
                play(pool, streams[:count], random.Random(seed), SHAPES[shape], most_live, limit)

        run()
