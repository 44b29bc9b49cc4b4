"""Content that the device itself writes and checks, before and after sleep and wake; graphs too.

On the CPU and on a GPU alike; on a GPU by kernels, so that nothing hides behind the host's copies.
"""

import pytest

import ringmem
from ringmem import residency

MIB = 2**20


@pytest.fixture
def device(own_device):
    return own_device


@pytest.fixture
def check(kernels, device):
    return kernels(device)


@pytest.fixture
def tag(device):
    sizes = {"slot_nbytes": 4 * MIB, "piece_nbytes": 16 * MIB}
    made = residency.tag(f"content {device.name}", "host", device, **sizes)
    yield made
    if made.state == "asleep":
        made.wake()
    made.close()


def buffers(device, tag, *sizes):
    made = [ringmem.empty(nbytes, "uint8", device=device, allocator=tag) for nbytes in sizes]
    device.default_stream.synchronize()
    return made


def test_what_a_kernel_wrote_is_there_after_sleep_and_wake(device, tag, check):
    # Several handles: what wake maps first (32 MiB here), and what it maps beside the copies.
    held = buffers(device, tag, 40 * MIB, 8, 100 * MIB + 24, 3 * MIB, 64 * MIB)
    gap = buffers(device, tag, 5 * MIB)[0]
    held += buffers(device, tag, 7 * MIB)
    gap.close()
    addresses = [buffer.ptr for buffer in held]
    for seed, buffer in enumerate(held):
        check.write(buffer.ptr, buffer.nbytes, seed)
    for _ in range(3):
        tag.sleep(check.stream)
        assert tag.committed == 0
        tag.wake()
        assert [buffer.ptr for buffer in held] == addresses
        for seed, buffer in enumerate(held):
            assert check.wrong(buffer.ptr, buffer.nbytes, seed) == 0
    for seed, buffer in enumerate(held):
        check.write(buffer.ptr, buffer.nbytes, 100 + seed)
    tag.sleep(check.stream)
    tag.wake()
    for seed, buffer in enumerate(held):
        assert check.wrong(buffer.ptr, buffer.nbytes, 100 + seed) == 0
        buffer.close()


def test_memory_of_others_is_untouched_while_a_tag_sleeps(device, tag, check):
    mine = buffers(device, tag, 32 * MIB)[0]
    other = ringmem.empty(32 * MIB, "uint8", device=device)
    device.default_stream.synchronize()
    other.stream.synchronize()
    check.write(mine.ptr, mine.nbytes, 1)
    check.write(other.ptr, other.nbytes, 2)
    tag.sleep(check.stream)
    more = ringmem.empty(32 * MIB, "uint8", device=device)  # takes what the tag gave back
    more.stream.synchronize()
    check.write(more.ptr, more.nbytes, 3)
    tag.wake()
    for seed, buffer in enumerate((mine, other, more), start=1):
        assert check.wrong(buffer.ptr, buffer.nbytes, seed) == 0
        buffer.close()


def test_sleep_waits_for_the_kernel_that_still_writes(device, tag, check):
    buffer = buffers(device, tag, 128 * MIB)[0]
    for seed in range(4):
        if device.platform == "cuda":
            check.submit_write(buffer.ptr, buffer.nbytes, seed)
        else:
            buffer.fill(seed, stream=check.stream)
        tag.sleep(check.stream)
        tag.wake()
        if device.platform == "cuda":
            assert check.wrong(buffer.ptr, buffer.nbytes, seed) == 0
        else:
            assert buffer.to_numpy().min() == buffer.to_numpy().max() == seed
    buffer.close()


@pytest.mark.parametrize("platform", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
def test_a_graph_of_a_kernel_replays_after_sleep_and_wake(device, tag, check, capture):
    buffer = buffers(device, tag, 64 * MIB)[0]
    check.write(buffer.ptr, buffer.nbytes, 1)
    graph = capture(
        check.stream, lambda: check.submit_write(buffer.ptr, buffer.nbytes // 2, seed=2)
    )
    half = buffer.nbytes // 2
    for _ in range(2):
        tag.sleep(check.stream)
        tag.wake()
        assert check.wrong(buffer.ptr, buffer.nbytes, 1) == 0  # nothing of the graph ran yet
        graph.launch()
        assert check.wrong(buffer.ptr, half, 2) == 0
        tag.sleep(check.stream)
        tag.wake()
        assert check.wrong(buffer.ptr, half, 2) == 0
        check.write(buffer.ptr, buffer.nbytes, 1)
    buffer.close()


@pytest.mark.parametrize("platform", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
def test_sleep_and_wake_do_not_spoil_a_capture_on_another_stream(device, tag, check, capture):
    """Also the first sleep, whose builders pin memory in threads of their own."""
    buffer = buffers(device, tag, 64 * MIB)[0]
    check.write(buffer.ptr, buffer.nbytes, 1)
    target = ringmem.empty(8 * MIB, "uint8", device=device)
    device.default_stream.synchronize()
    target.stream.synchronize()
    other = device.create_stream()

    def submit():
        check.submit_write(target.ptr, target.nbytes, 7)
        for _ in range(2):
            tag.sleep(other)
            tag.wake()
        check.submit_write(target.ptr, target.nbytes, 8)

    graph = capture(check.stream, submit)
    graph.launch()
    assert check.wrong(target.ptr, target.nbytes, 8) == 0
    assert check.wrong(buffer.ptr, buffer.nbytes, 1) == 0
    buffer.close()
    target.close()
