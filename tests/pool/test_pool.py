"""What a Pool promises: memory in stream order, limits, callbacks, figures, and an end."""

import gc
import itertools
import weakref

import numpy as np
import pytest

import ringmem
from ringmem import DeviceBuffer, Pool
from ringmem.native import _native

MIB = 1 << 20


# --- allocation -----------------------------------------------------------------------------------


def test_a_dropped_allocation_is_reused_at_once_on_its_stream(device):
    pool = Pool(device)
    first = pool.allocate(5 * MIB)
    ptr = first.ptr
    del first
    assert pool.allocate(5 * MIB).ptr == ptr
    assert pool.statistics().reserved <= 6 * MIB


def test_blocks_that_live_do_not_overlap_and_are_aligned(device):
    pool = Pool(device)
    blocks = [pool.allocate(n) for n in (1, 255, 256, 257, 4096, 33000, MIB - 1, 3 * MIB)]
    spans = sorted((block.ptr, block.ptr + block.nbytes) for block in blocks)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(start % 256 == 0 for start, _ in spans)


@pytest.mark.parametrize("alignment", [512, 4096, 2 * MIB, 8 * MIB])
def test_an_alignment_is_kept(device, alignment):
    pool = Pool(device)
    hold = pool.allocate(700)
    blocks = [pool.allocate(1000, alignment=alignment) for _ in range(3)]
    assert all(block.ptr % alignment == 0 for block in blocks)
    assert len({block.ptr for block in (hold, *blocks)}) == 4


@pytest.mark.parametrize("alignment", [3, 0, -4, 1 << 31])
def test_an_impossible_alignment_is_refused(device, alignment):
    with pytest.raises(ringmem.InvalidValueError, match="alignment"):
        Pool(device).allocate(1000, alignment=alignment)


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 41, 1 << 62, 1 << 70])
def test_impossible_sizes_are_refused_before_the_driver(faulty, nbytes):
    pool = Pool(ringmem.devices_of(faulty)[0])
    before = dict(faulty.calls)
    with pytest.raises(ringmem.InvalidValueError, match="nbytes"):
        pool.allocate(nbytes)
    assert faulty.calls == before


def test_what_is_no_size_is_a_type_error(device):
    with pytest.raises(TypeError, match="nbytes='8': give an integer"):
        Pool(device).allocate("8")
    with pytest.raises(TypeError, match="alignment=None|alignment=1.5: give an integer"):
        Pool(device).allocate(8, alignment=1.5)
    with pytest.raises(AttributeError, match="no setting 'limt'"):
        Pool(device).limt = 5


def test_a_block_freed_by_its_address_is_not_freed_again(device):
    pool = Pool(device)
    block = pool.allocate(4096)
    pool.deallocate(block.ptr)
    with pytest.raises(ringmem.DoubleFreeError, match="4096 bytes was freed already"):
        block.close()
    pool.allocate(4096).close()


def test_making_a_pool_makes_no_driver_call(faulty):
    device = ringmem.devices_of(faulty)[0]
    before = dict(faulty.calls)
    Pool(device).close()
    assert faulty.calls == before


def test_typed_memory_holds_what_is_written(device):
    pool = Pool(device)
    with pool.empty((3, 5), "f4") as buffer:
        buffer.fill(2.5)
        assert (buffer.to_numpy() == 2.5).all()
    with pool.empty(0, "f8") as nothing:
        assert nothing.nbytes == 0
    assert pool.statistics().live == 0


def test_a_pool_is_the_allocator_of_buffers_in_its_scope_and_thread(device):
    pool = Pool(device)
    with device.use(pool):
        inside = ringmem.zeros(100, "i4", device=device)
    outside = ringmem.zeros(100, "i4", device=device)
    given = ringmem.DeviceBuffer(100, "i4", device=device, allocator=pool)
    assert pool.statistics().live == 2
    for buffer in (inside, outside, given):
        buffer.close()
    assert pool.statistics().live == 0


def test_a_buffer_keeps_the_pool_that_it_came_from(device):
    pool = Pool(device)
    buffer = pool.empty(1000, "u1")
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    buffer.fill(7)
    assert (buffer.to_numpy() == 7).all()
    buffer.close()


def test_freeing_on_another_stream_orders_the_first_one_before_reuse(device):
    pool = Pool(device)
    a, b = device.create_stream(), device.create_stream()
    pool.allocate(MIB, a).close(b)
    waits = pool.statistics().device_waits
    block = pool.allocate(MIB, b)
    assert pool.statistics().device_waits > waits
    block.close()


# --- addresses ------------------------------------------------------------------------------------


def test_a_double_free_is_caught(device):
    pool = Pool(device)
    ptr = pool.allocate_ptr(4096)
    pool.deallocate(ptr)
    with pytest.raises(ringmem.DoubleFreeError):
        pool.deallocate(ptr)


def test_a_foreign_pointer_is_caught(device):
    pool, other = Pool(device), Pool(device)
    block = other.allocate(4096)
    for ptr in (block.ptr, 12345, block.ptr + 256):
        with pytest.raises(ringmem.DoubleFreeError):
            pool.deallocate(ptr)


def test_a_wrong_size_at_free_is_caught_and_frees_nothing(device):
    pool = Pool(device)
    ptr = pool.allocate_ptr(4096)
    with pytest.raises(ringmem.InvalidValueError, match="4096"):
        pool.deallocate(ptr, 4095)
    assert pool.statistics().live == 1
    pool.deallocate(ptr, 4096)


def test_closing_twice_frees_once(device):
    pool = Pool(device)
    block = pool.allocate(100)
    block.close()
    block.close()
    assert pool.statistics().frees == 1
    with pytest.raises(ringmem.ClosedError):
        block.ptr  # noqa: B018


# --- limits ---------------------------------------------------------------------------------------


def test_a_limit_is_kept_and_named_in_the_error(device):
    pool = Pool(device, limit="8 MiB")
    hold = pool.allocate(6 * MIB)
    with pytest.raises(ringmem.OutOfMemoryError) as caught:
        pool.allocate(4 * MIB)
    error = caught.value
    assert (error.requested, error.reserved) == (4 * MIB, 6 * MIB)
    assert error.free is not None
    assert error.largest_free_block is not None
    assert str(6 * MIB) in error.holders[0]
    assert f"{4 * MIB} bytes requested" in str(error)
    assert f"the pool's limit is {8 * MIB}" in str(error)
    assert isinstance(error, MemoryError)
    hold.close()
    pool.allocate(8 * MIB).close()


def test_a_limit_below_one_page_is_refused_and_says_what_would_do(device):
    page = ringmem.allocation_granularity(device)
    for nbytes in (0, 1, page - 1):
        with pytest.raises(
            ringmem.InvalidValueError, match=rf"^limit is {nbytes}: .* page .* {page} bytes"
        ):
            Pool(device, limit=nbytes)
    pool = Pool(device, limit=page)
    with pytest.raises(ringmem.InvalidValueError, match=f"limit is {page - 1}: "):
        pool.limit = page - 1
    assert pool.limit == page
    pool.allocate(page).close()


def test_a_limit_below_what_lives_is_refused_and_changes_nothing(device):
    pool = Pool(device, limit="16 MiB")
    hold = pool.allocate(6 * MIB)
    with pytest.raises(ringmem.InvalidValueError, match="limit"):
        pool.limit = "4 MiB"
    assert pool.limit == 16 * MIB
    pool.limit = hold.nbytes
    assert pool.limit == 6 * MIB
    pool.limit = None
    assert pool.limit is None


def test_a_limit_that_pages_in_use_do_not_allow_is_refused_with_what_would_do(device):
    pool = Pool(device)
    blocks = [pool.allocate(MIB) for _ in range(64)]
    for block in blocks[1::2]:
        block.close()
    pool.allocate(4 * MIB).close()
    reserved = pool.reserved
    assert reserved > 64 * MIB  # a half of every page is free, and a tail that could go
    with pytest.raises(ringmem.InvalidValueError, match=rf"^limit is {33 * MIB}: .* {64 * MIB} "):
        pool.limit = 33 * MIB
    assert (pool.limit, pool.reserved) == (None, reserved)
    pool.limit = 64 * MIB
    assert pool.reserved == 64 * MIB
    again = [pool.allocate(MIB) for _ in range(32)]
    assert len({block.ptr for block in (*blocks[::2], *again)}) == 64
    assert pool.reserved == 64 * MIB


def test_a_limit_is_kept_though_small_blocks_hold_more_than_they_use(device):
    pool = Pool(device)
    live = [pool.allocate(n) for n in range(256, 32769, 256)]
    cached = [pool.allocate(3 * MIB + 4096) for _ in range(10)]
    del cached
    for nbytes in range(pool.reserved, 0, -2 * MIB):
        try:
            pool.limit = nbytes
        except ringmem.InvalidValueError:
            assert pool.reserved <= pool.limit < nbytes + 4 * MIB
            break
        assert pool.reserved <= nbytes
    else:
        pytest.fail("every limit was allowed")
    assert len(live) == 128


@pytest.mark.parametrize("argument", ["limit", "release_threshold"])
@pytest.mark.parametrize("value", [-1, "much", 1.5, "1 EiB and more"])
def test_a_setting_that_is_no_size_names_itself(device, argument, value):
    with pytest.raises(ringmem.InvalidValueError, match=argument):
        Pool(device, **{argument: value})


def test_fragments_are_remapped_before_memory_is_declared_out(device):
    pool = Pool(device, limit="32 MiB")
    blocks = [pool.allocate(2 * MIB) for _ in range(16)]
    for block in blocks[::2]:
        block.close()
    whole = pool.allocate(16 * MIB)
    statistics = pool.statistics()
    assert statistics.remaps > 0
    assert statistics.reserved <= 32 * MIB
    device.driver.fill_async(device.ordinal, whole.ptr, 0x5A, 1, whole.nbytes, 0)
    device.synchronize()


def test_a_release_threshold_trims_at_once_and_after_frees(device):
    pool = Pool(device)
    pool.allocate(32 * MIB).close()
    pool.release_threshold = "4 MiB"
    assert pool.statistics().cached <= 4 * MIB
    pool.allocate(32 * MIB).close()
    device.default_stream.synchronize()
    pool.allocate(256).close()
    assert pool.statistics().cached <= 4 * MIB


def test_trim_gives_back_what_is_free_and_keeps_what_lives(device):
    pool = Pool(device)
    hold = pool.allocate(4 * MIB)
    pool.allocate(64 * MIB).close()
    pool.trim(keep_bytes="8 MiB")
    assert pool.statistics().cached <= 8 * MIB
    pool.trim()
    statistics = pool.statistics()
    assert (statistics.allocated, statistics.cached) == (4 * MIB, 0)
    hold.close()


def test_reserve_makes_the_next_allocation_free_of_driver_calls(device):
    pool = Pool(device)
    pool.reserve("48 MiB")
    with pool.statistics() as region, pool.allocate(48 * MIB):
        pass
    assert region.driver_calls == 0
    with pytest.raises(ringmem.InvalidValueError):
        pool.reserve(0)


# --- callbacks ------------------------------------------------------------------------------------


def test_a_callback_that_frees_saves_the_allocation(device):
    pool = Pool(device, limit="8 MiB")
    hoard = [pool.allocate(6 * MIB)]
    asked = []

    def let_go(requested, statistics):
        asked.append((requested, statistics.live))
        hoard.clear()
        return True

    pool.add_out_of_memory_callback(let_go)
    pool.allocate(4 * MIB).close()
    assert asked == [(4 * MIB, 1)]
    assert pool.statistics().retries >= 1


def test_what_a_callback_raises_is_the_cause(device):
    pool = Pool(device, limit="2 MiB")
    hold = pool.allocate(2 * MIB)

    def broken(requested, statistics):
        raise KeyError("no such cache")

    remove = pool.add_out_of_memory_callback(broken)
    for allocate in (lambda: pool.allocate(MIB), lambda: pool.empty(MIB, "u1")):
        with pytest.raises(ringmem.OutOfMemoryError) as caught:
            allocate()
        assert isinstance(caught.value.__cause__, KeyError)
    remove()
    with pytest.raises(ringmem.OutOfMemoryError) as caught:
        pool.allocate(MIB)
    assert caught.value.__cause__ is None
    hold.close()


def test_an_allocation_from_a_callback_calls_no_callbacks(device):
    pool = Pool(device, limit="4 MiB")
    hold = pool.allocate(4 * MIB)
    depth = []

    def nested(requested, statistics):
        depth.append(1)
        with pytest.raises(ringmem.OutOfMemoryError):
            pool.allocate(3 * MIB)
        return False

    pool.add_out_of_memory_callback(nested)
    with pytest.raises(ringmem.OutOfMemoryError):
        pool.allocate(MIB)
    assert depth == [1]
    hold.close()


def test_a_callback_that_knows_its_pool_is_no_leak(device):
    def make():
        pool = Pool(device)
        pool.add_out_of_memory_callback(lambda requested, statistics: pool.closed)
        return weakref.ref(pool)

    gone = make()
    gc.collect()
    assert gone() is None


# --- figures --------------------------------------------------------------------------------------


def test_statistics_count_what_was_done(device):
    pool = Pool(device)
    blocks = [pool.allocate(1000) for _ in range(10)]
    blocks[0].close()
    s = pool.statistics()
    assert (s.allocations, s.frees, s.live, s.requested) == (10, 1, 9, 9000)
    assert s.peak_requested == 10_000
    assert s.hits + s.misses == 10
    assert s.allocated >= s.requested
    assert 0 <= s.internal_fragmentation < 0.125
    assert s.to_dict()["live"] == 9


def test_a_region_sees_its_own_totals_and_peaks(device):
    pool = Pool(device)
    pool.allocate(10 * MIB).close()
    hold = pool.allocate(1 * MIB)
    with pool.statistics() as outer:
        pool.allocate(4 * MIB).close()
        with pool.statistics() as inner:
            pool.allocate(2 * MIB).close()
        pool.allocate(100).close()
    assert (outer.allocations, inner.allocations) == (3, 1)
    assert (outer.peak_requested, inner.peak_requested) == (5 * MIB, 3 * MIB)
    assert pool.statistics().peak_requested == 10 * MIB
    pool.allocate(100).close()
    assert outer.allocations == 3
    pool.reset_peaks()
    assert pool.statistics().peak_requested == hold.nbytes


# --- the end --------------------------------------------------------------------------------------


def test_close_names_what_lives_and_refuses(device):
    pool = Pool(device)
    block = pool.allocate(5000)
    with pytest.raises(ringmem.InvalidValueError, match=hex(block.ptr)):
        pool.close()
    pool.allocate(10).close()
    block.close()
    pool.close()
    pool.close()
    assert pool.closed
    with pytest.raises(ringmem.ClosedError):
        pool.allocate(1)
    assert pool.reserved == 0


def test_close_when_unused_gives_memory_back_with_the_last_block(device):
    pool = Pool(device)
    block = pool.allocate(5 * MIB)
    pool.close(when_unused=True)
    with pytest.raises(ringmem.ClosedError):
        pool.allocate(1)
    device.driver.fill_async(device.ordinal, block.ptr, 1, 1, block.nbytes, 0)
    block.close()
    device.synchronize()
    pool.trim()
    assert pool.reserved == 0


def test_a_stream_may_be_destroyed_while_its_blocks_are_pending(device):
    pool = Pool(device)
    stream = device.create_stream()
    block = pool.allocate(4 * MIB, stream)
    device.driver.fill_async(device.ordinal, block.ptr, 1, 1, block.nbytes, stream.handle)
    block.close()
    stream.close()
    again = pool.allocate(4 * MIB)
    device.driver.fill_async(device.ordinal, again.ptr, 2, 1, again.nbytes, 0)
    device.synchronize()
    again.close()
    pool.close()


def test_a_block_outlives_its_stream(device):
    pool = Pool(device)
    stream = device.create_stream()
    block = pool.allocate(4 * MIB, stream)
    stream.close()
    block.close()
    ringmem.native._native.flush_reaper(10.0)
    assert pool.statistics().live == 0
    pool.close()


@pytest.mark.parametrize("nbytes", [100, 3 * MIB])
def test_debug_mode_finds_writes_beyond_a_block(device, nbytes):
    pool = Pool(device, debug=True)
    with pool.allocate(nbytes) as block:
        device.driver.fill_async(device.ordinal, block.ptr + nbytes, 1, 1, 4, 0)
    device.synchronize()
    (report,) = pool.debug_reports()
    assert report.kind == "overrun"
    assert report.allocated_at.startswith(__file__)
    pool.close()


@pytest.mark.parametrize(
    "allocate",
    [
        lambda pool: pool.allocate(100),
        lambda pool: pool.empty(100),
        lambda pool: DeviceBuffer(100, device=pool.device, allocator=pool),
        lambda pool: used(pool),
    ],
    ids=["allocate", "empty", "allocator", "use"],
)
def test_a_report_names_the_line_that_allocated_however_it_did(device, allocate):
    pool = Pool(device, debug=True)
    first = pool.allocate(100)  # another line
    with allocate(pool) as block:
        device.driver.fill_async(device.ordinal, block.ptr + 100, 1, 1, 4, 0)
    device.synchronize()
    (report,) = pool.debug_reports()
    code = (used if "used" in allocate.__code__.co_names else allocate).__code__
    lines = range(code.co_firstlineno, code.co_firstlineno + 3)
    assert report.allocated_at in [f"{__file__}:{line}" for line in lines]
    assert report.message == "written at byte 100, behind its end"
    first.close()
    pool.close()


def used(pool):
    with pool.device.use(pool):
        return DeviceBuffer(100, device=pool.device)


def test_debug_mode_is_an_environment_variable(device, monkeypatch):
    monkeypatch.setenv("RINGMEM_POOL_DEBUG", "1")
    assert Pool(device).options["debug"]
    monkeypatch.setenv("RINGMEM_POOL_DEBUG", "0")
    assert not Pool(device).options["debug"]


# --- policies -------------------------------------------------------------------------------------


def test_power_of_two_buckets_serve_their_own_size_only(device):
    pool = Pool(device, policy="power_of_two")
    pool.allocate(3000).close()
    first = pool.statistics()
    pool.allocate(4096).close()  # the same bucket
    second = pool.statistics()
    pool.allocate(2000).close()  # a smaller one
    third = pool.statistics()
    assert (first.hits, second.hits, third.hits) == (0, 1, 1)
    assert (first.misses, second.misses, third.misses) == (1, 1, 2)
    assert third.returns == 3


def test_exact_bins_serve_their_own_size_only(device):
    pool = Pool(device, policy="exact")
    for nbytes, hits in ((512, 0), (512, 1), (1024, 1), (512, 2), (1024, 3)):
        pool.allocate(nbytes).close()
        assert pool.statistics().hits == hits
    pool.trim()
    pool.allocate(512).close()
    assert pool.statistics().hits == 3


def test_an_unknown_policy_is_refused(device):
    with pytest.raises(ringmem.InvalidValueError, match="policy"):
        Pool(device, policy="random")


def test_a_peer_uses_the_memory(device):
    with ringmem.simulate(devices=2, capacity="64 MiB", peers=True) as simulation:
        first, second = simulation.devices
        pool = Pool(first, peers=[second])
        with pool.allocate(4096) as block:
            second.driver.fill_async(second.ordinal, block.ptr, 3, 1, 4096, 0)
            second.synchronize()
            out = np.zeros(4096, "u1")
            first.driver.copy_async(first.ordinal, out.ctypes.data, block.ptr, 4096, 0)
            first.synchronize()
        assert (out == 3).all()
        with pytest.raises(ringmem.InvalidValueError, match="peers"):
            Pool(first, peers=[first])


def test_a_peer_of_another_driver_is_told_by_more_than_its_name():
    mine, theirs = (ringmem.simulate().devices[0] for _ in range(2))
    with pytest.raises(ringmem.InvalidValueError, match="peers holds cpu:0 of another driver"):
        Pool(mine, peers=[theirs])


def test_a_pool_is_no_allocator_of_another_devices_buffers():
    with ringmem.simulate(devices=2) as simulation:
        first, second = simulation.devices
        with Pool(first) as pool:
            with pytest.raises(
                ringmem.InvalidValueError, match="memory is that of cpu:0.*give device="
            ):
                ringmem.empty(3, "u1", device=second, allocator=pool)
            with pytest.raises(ringmem.InvalidValueError, match="cpu:0"), second.use(pool):
                pass
            ringmem.empty(3, "u1", device=first, allocator=pool).close()
            assert pool.statistics().live == 0


def test_an_allocator_of_other_memory_is_refused_by_name():
    with ringmem.simulate(devices=2) as simulation, ringmem.simulate() as elsewhere:
        first, second = simulation.devices
        stranger = elsewhere.devices[0]
        pinned, managed = ringmem.PinnedPool(first), ringmem.UnifiedPool(stranger)
        refused = [
            (lambda: ringmem.DeviceBuffer(3, device=first, allocator=second.allocator), "cpu:1"),
            (lambda: first.use(stranger.allocator).__enter__(), "another driver, as in another"),
            (
                lambda: ringmem.PinnedBuffer(3, device=first, allocator=first.allocator),
                "device mem",
            ),
            (lambda: ringmem.PinnedBuffer(3, device=first, allocator=Pool(first)), "device mem"),
            (lambda: ringmem.UnifiedBuffer(3, device=first, allocator=first.allocator), "managed"),
            (lambda: ringmem.UnifiedBuffer(3, device=first, allocator=managed), "another driver"),
            (lambda: ringmem.DeviceBuffer(3, device=first, allocator=pinned), "page-locked"),
        ]
        for make, why in refused:
            with pytest.raises(ringmem.InvalidValueError, match=why):
                make()
        # Page-locked memory is every device's.
        ringmem.PinnedBuffer(3, device=second, allocator=pinned).close()
        ringmem.DeviceBuffer(3, device=second, allocator=second.allocator).close()


def test_debug_mode_takes_and_refuses_what_a_pool_does(device):
    pool = Pool(device, debug=True)
    aligned = pool.allocate(100, alignment=4096)
    assert aligned.ptr % 4096 == 0
    device.driver.fill_async(device.ordinal, aligned.ptr - 4, 1, 1, 2, 0)
    aligned.close()
    for wrong in (3, 1 << 40, 1 << 63):
        with pytest.raises(ringmem.InvalidValueError, match="alignment"):
            pool.allocate(100, alignment=wrong)
    ptr = pool.allocate_ptr(100)
    assert pool.find(ptr) == 100
    assert pool.live_blocks() == [(ptr, 100)]
    with pytest.raises(ringmem.InvalidValueError, match="nbytes is 50"):
        pool.deallocate(ptr, 50)
    with pytest.raises(ringmem.InvalidValueError, match=f"100 B at {ptr:#x} of {__file__}:"):
        pool.close()
    pool.deallocate(ptr, 100)
    assert pool.find(ptr) is None
    with pytest.raises(ringmem.DoubleFreeError):
        pool.deallocate(ptr)
    device.synchronize()
    found = {report.kind: report.message for report in pool.debug_reports()}
    assert found == {"double_free": "freed twice", "underrun": "written 4 bytes before it"}
    pool.close()


def test_debug_mode_says_where_the_holders_of_memory_were_allocated(device):
    pool = Pool(device, debug=True, limit=8 * MIB)
    with pool.allocate(6 * MIB), pytest.raises(ringmem.OutOfMemoryError) as caught:
        pool.allocate(6 * MIB)
    assert f"of {__file__}:" in caught.value.holders[0]
    pool.close()


def test_an_alignment_may_be_the_third_argument(device):
    with Pool(device) as pool:
        block = pool.allocate(100, None, 4096)
        assert block.ptr % 4096 == 0
        block.close()
        with pytest.raises(TypeError, match="nbytes, stream and alignment"):
            pool.allocate(100, None, 4096, 1)


@pytest.mark.parametrize("kind", [ringmem.PinnedPool, ringmem.UnifiedPool, ringmem.NativePool])
def test_no_pool_takes_a_setting_that_it_does_not_know(device, kind):
    with kind(device) as pool, pytest.raises(AttributeError, match=f"{kind.__name__} has no"):
        pool.limits = 5


@pytest.mark.parametrize(
    ("argument", "value"), [("policy", None), ("policy", []), ("peers", 3), ("peers", "cpu:1")]
)
def test_a_pool_names_the_argument_that_will_not_do(device, argument, value):
    with pytest.raises(ringmem.InvalidValueError, match=f"{argument} is"):
        Pool(device, **{argument: value})


# --- very large devices ---------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [64 << 30, (48 << 30) + 1000 * 1000], ids=["pages", "odd"])
def test_free_memory_beyond_what_one_node_counts_is_kept_and_given_back(nbytes):
    driver = _native.FaultyDriver(_native.HostDriver("devices=1,capacity=4TiB"))
    pool = Pool(ringmem.devices_of(driver)[0])
    blocks = [pool.allocate(nbytes) for _ in range((2 << 40) // nbytes + 3)]
    addresses = {block.ptr for block in blocks}
    del blocks[::2]
    del blocks[:]
    assert pool.inconsistency() == ""
    reserved = pool.reserved
    assert reserved > 2 << 40
    again = [pool.allocate(nbytes) for _ in addresses]
    assert pool.reserved == reserved
    del again
    pool.trim(1 << 40)
    assert pool.inconsistency() == ""
    assert pool.reserved <= 1 << 40
    pool.close()
    assert driver.live["physical"] == driver.live["mapping"] == 0
