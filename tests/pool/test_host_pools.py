"""Pools of memory that the host uses: no reuse before a stream's work is done."""

import itertools
import random
import threading

import numpy as np
import pytest

import ringmem
from ringmem import PinnedPool, UnifiedPool
from ringmem.native import _native

MIB = 1 << 20


@pytest.fixture(params=[PinnedPool, UnifiedPool])
def make(request):
    return request.param


def test_memory_of_the_host_alone_is_reused_at_once(device, make):
    pool = make(device, arena_nbytes="2 MiB")
    with pool.allocate(5000) as block:
        ptr = block.ptr
        assert block.stream is None
    with pool.allocate(5000) as block:
        assert block.ptr == ptr
    assert pool.statistics().arenas == 1


def test_memory_that_a_stream_uses_is_not_reused_before_its_work_is_done(device, make):
    pool = make(device, arena_nbytes="2 MiB")
    stream = device.create_stream()
    with PinnedPool(device, arena_nbytes="2 MiB") as words, words.allocate(4) as word:
        value = np.frombuffer((np.ctypeslib.ctypes.c_char * 4).from_address(word.ptr), "u4")
        value[0] = 0
        device.driver.stream_wait_value(device.ordinal, stream.handle, word.ptr, 1)
        block = pool.allocate(5000, stream)
        ptr = block.ptr
        block.close()
        with pool.allocate(5000, stream) as other:
            assert other.ptr != ptr
        assert pool.statistics().pending > 0
        value[0] = 1
        stream.synchronize()
        pool.trim()
        assert pool.statistics().pending == 0
    pool.close()


def test_recorded_streams_and_buffers_count_as_well(device):
    pool = PinnedPool(device, arena_nbytes="2 MiB")
    stream = device.create_stream()
    block = pool.allocate(4096)
    block.record_stream(stream)
    block.close()
    assert pool.statistics().pending == 4096
    with pool.empty(1000, "f4", stream) as buffer:
        buffer.fill(1.5, stream=stream)
        assert (buffer.to_numpy() == 1.5).all()
    stream.synchronize()
    pool.trim()
    assert pool.statistics().reserved == 0


def test_blocks_never_overlap_and_join_again(device, make):
    pool = make(device, arena_nbytes="4 MiB")
    rng = random.Random(5)
    live = []
    for _ in range(4000):
        if live and rng.random() < 0.48:
            live.pop(rng.randrange(len(live))).close()
        else:
            live.append(pool.allocate(int(2 ** rng.uniform(0, 17))))
    spans = sorted((b.ptr, b.ptr + b.nbytes) for b in live)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    s = pool.statistics()
    assert (s.live, s.requested) == (len(live), sum(b.nbytes for b in live))
    del live
    pool.trim()
    assert pool.statistics().reserved == 0


def test_close_refuses_while_blocks_live(device, make):
    pool = make(device, arena_nbytes="2 MiB")
    block = pool.allocate(100)
    with pytest.raises(ringmem.InvalidValueError, match=hex(block.ptr)):
        pool.close()
    block.close()
    pool.close()
    pool.close()
    with pytest.raises(ringmem.ClosedError):
        pool.allocate(1)


def test_a_limit_is_kept(device, make):
    pool = make(device, limit="4 MiB", arena_nbytes="2 MiB")
    hold = pool.allocate(3 * MIB)
    with pytest.raises(ringmem.OutOfMemoryError) as caught:
        pool.allocate(2 * MIB)
    assert caught.value.reserved == 4 * MIB
    with pytest.raises(ringmem.InvalidValueError, match="limit"):
        pool.limit = MIB
    pool.limit = None
    pool.allocate(2 * MIB).close()
    hold.close()


@pytest.mark.parametrize("nbytes", [0, -5, 1 << 50])
def test_impossible_sizes_are_refused(device, make, nbytes):
    with pytest.raises(ringmem.InvalidValueError, match="nbytes"):
        make(device).allocate(nbytes)


def test_pinned_memory_is_known_to_the_driver_and_given_back(faulty):
    device = ringmem.devices_of(faulty)[0]
    pool = PinnedPool(device, arena_nbytes="2 MiB")
    with pool.allocate(MIB) as block:
        info = faulty.pointer_info(0, block.ptr)
        assert info.kind == _native.PointerKind.pinned
    assert faulty.calls["host_register"] == 1
    pool.close()
    _native.flush_reaper(10.0)
    assert faulty.calls["host_unregister"] == 1


def test_where_memory_cannot_be_registered_it_is_allocated_locked():
    with ringmem.simulate(capacity="64 MiB", host_register=False) as simulation:
        pool = PinnedPool(simulation.devices[0], arena_nbytes="2 MiB")
        pool.allocate(MIB).close()
        pool.close()
        _native.flush_reaper(10.0)


def test_a_failed_registration_leaves_nothing(faulty):
    device = ringmem.devices_of(faulty)[0]
    pool = PinnedPool(device, arena_nbytes="2 MiB")
    faulty.fail("host_register", nth=1)
    with pytest.raises(ringmem.DriverError):
        pool.allocate(MIB)
    assert pool.statistics().reserved == 0
    pool.allocate(MIB).close()
    pool.close()


def test_unified_memory_needs_a_device_that_has_it():
    with (
        ringmem.simulate(managed=False) as simulation,
        pytest.raises(ringmem.NotSupportedError),
    ):
        UnifiedPool(simulation.devices[0])


def test_many_threads_share_a_pool(device, make):
    pool = make(device, arena_nbytes="4 MiB")
    failures = []

    def work(seed):
        rng = random.Random(seed)
        try:
            live = []
            for _ in range(2000):
                live.append(pool.allocate(int(2 ** rng.uniform(4, 15))))
                if len(live) > 20:
                    live.pop(rng.randrange(len(live))).close()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.statistics().live == 0
