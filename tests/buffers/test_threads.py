"""Many threads on one buffer: counts stay exact, and closing wins or loses, never half."""

import contextlib
import threading

import numpy as np

import ringmem
from ringmem.native import _native


def together(count, work):
    barrier = threading.Barrier(count)
    failures = []

    def body(index):
        barrier.wait()
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_exports_of_many_threads_are_counted_exactly(device):
    buffer = ringmem.zeros(100, "f4", device=device)

    def work(index):
        for _ in range(300):
            view = buffer[index:]
            array = view.numpy()
            capsule = buffer.__dlpack__()
            copy = np.from_dlpack(view[:1])
            del array, capsule, copy
            view.close()

    assert together(8, work) == []
    assert _native.buffer_uses(buffer) == 0
    buffer.close()


def test_closing_races_with_use_without_a_crash_or_a_loss(faulty, live_objects):
    device = ringmem.devices_of(faulty)[0]
    for _ in range(30):
        buffer = ringmem.zeros(1000, "f4", device=device)
        other = ringmem.zeros(1000, "f4", device=device)

        def work(index, buffer=buffer, other=other):
            for _ in range(20):
                if index == 0:
                    with contextlib.suppress(ringmem.InvalidValueError):
                        buffer.close()
                elif index == 1:
                    other.copy_from(buffer)
                elif index == 2:
                    buffer[:10].to_numpy()
                else:
                    np.asarray(buffer).sum()

        failures = together(4, work)
        assert all(isinstance(error, ringmem.ClosedError) for error in failures)
        buffer.close()
        other.close()
    assert {k for k, n in live_objects(faulty).items() if n} <= {"pool"}


def test_many_threads_allocate_and_free(faulty, live_objects):
    device = ringmem.devices_of(faulty)[0]

    def work(index):
        for i in range(50):
            with ringmem.full(i + 1, index, "i4", device=device) as buffer:
                assert (buffer.to_numpy() == index).all()
            ringmem.PinnedBuffer(10, device=device)

    assert together(6, work) == []
    assert {k for k, n in live_objects(faulty).items() if n} <= {"pool"}


def test_only_one_of_many_closers_frees(faulty):
    device = ringmem.devices_of(faulty)[0]
    for _ in range(50):
        buffer = ringmem.empty(1000, device=device)
        before = faulty.calls["mem_free_async"]
        assert together(4, lambda _, buffer=buffer: buffer.close()) == []
        assert faulty.calls["mem_free_async"] == before + 1
