"""Many threads on one buffer: counts stay exact, and closing wins or loses, never half."""

import contextlib
import threading
import time

import numpy as np
import pytest

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


# --- one buffer from several threads in every way ------------------------------------------------


def make(kind, device):
    if kind == "device":
        return ringmem.full(1000, 7, "i4", device=device)
    if kind == "pinned":
        buffer = ringmem.PinnedBuffer(1000, "i4", device=device)
        buffer.fill(7)
        return buffer
    buffer = ringmem.UnifiedBuffer(1000, "i4", device=device)
    buffer.fill(7)
    return buffer


def tolerant(body):
    """`body`, done until the buffer is closed."""

    def run():
        with contextlib.suppress(ringmem.ClosedError):
            for _ in range(8):
                body()

    return run


@pytest.mark.parametrize("view", [False, True], ids=["owner", "view"])
@pytest.mark.parametrize("kind", ["device", "pinned", "unified"])
def test_a_buffer_is_used_in_every_way_while_it_is_closed(faulty, live_objects, hammer, kind, view):
    device = ringmem.devices_of(faulty)[0]
    other = device.create_stream()
    copies = ringmem.empty(10, "i4", device=device)

    for _ in range(25):
        owner = make(kind, device)
        target = owner[100:] if view else owner

        def close(target=target):
            for _ in range(30):
                with contextlib.suppress(ringmem.InvalidValueError):  # in use just then
                    target.close()

        def look(target=target, owner=owner):
            for _ in range(8):
                assert (target.nbytes, target.shape) in ((4000, (1000,)), (3600, (900,)))
                assert target.is_view in ((True, False) if view else (False,))
                assert repr(target)
                root = _native.buffer_owner(target)
                assert root in (None, owner) if view else root is None
                _native.buffer_streams_in_use(target)

        def slices(target=target):
            part = target[:10].view("u4").reshape(2, 5)
            assert (part.to_numpy() == 7).all()

        def exports(target=target):
            if kind != "unified":  # which the host sees inside host() alone
                assert np.from_dlpack(target).sum() == 7 * target.size
                assert memoryview(target)[3] == 7

        def copies_out(target=target):
            copies.copy_from(target[-10:])
            target.record_stream(other)

        failures = hammer.together(
            close, look, tolerant(slices), tolerant(exports), tolerant(copies_out)
        )
        assert failures == []
        target.close()
        owner.close()
        assert (owner.closed, target.closed) == (True, True)
    assert (copies.to_numpy() == 7).all()
    copies.close()
    owner = target = close = look = slices = exports = copies_out = None
    assert set(live_objects(faulty)) <= {"pool", "stream", "event"}  # which the device keeps


def test_views_of_one_root_are_closed_and_dropped_by_whoever_comes_first(device, hammer):
    for _ in range(40):
        root = ringmem.full(100, 3, "i4", device=device)
        views = [root[i:] for i in range(20)]

        def close(views=views):
            for view in views:
                with contextlib.suppress(ringmem.InvalidValueError):
                    view.close()

        def order(views=views):
            for view in reversed(views):
                _native.buffer_order(view, None)
                _native.buffer_stream(view)
                assert _native.buffer_root(view)[1] in (400, view.nbytes)

        assert hammer.together(close, close, order, order) == []
        for view in views:
            view.close()
        assert _native.buffer_uses(root) == 0
        root.close()


def test_a_capsule_is_taken_by_one_thread(device, hammer):
    buffer = ringmem.zeros(10, "i4", device=device)
    taken = []

    def take():
        with contextlib.suppress(ringmem.InvalidValueError):
            taken.append(_native.take_dlpack_capsule(capsule))

    for _ in range(300):
        capsule = buffer.__dlpack__()
        assert hammer.together(take, take, take, take) == []
        assert len(taken) == 1
        assert _native.buffer_uses(buffer) == 1
        taken.clear()
        assert _native.buffer_uses(buffer) == 0
    buffer.close()


def test_only_one_thread_is_inside_host_where_memory_is_handed_over(hammer):
    with ringmem.simulate(concurrent_managed_access=False, capacity="64 MiB") as simulation:
        device = simulation.devices[0]
        buffer = ringmem.UnifiedBuffer(10, "i4", device=device)
        buffer.fill(0)
        inside, entered = [], []

        def enter(number):
            try:
                with buffer.host() as array:
                    inside.append(1)
                    assert len(inside) == 1
                    array += 1
                    entered.append(1)
                    inside.pop()
                    del array
            except ringmem.InvalidValueError:
                time.sleep(0)  # another thread has it

        assert hammer.repeat(enter, enter, enter, enter) == []
        assert len(entered) > 1
        assert (buffer.to_numpy() == len(entered)).all()
        buffer.close()


def test_dtypes_are_known_to_all_threads(device, hammer):
    names = ["f4", "i8", "u1", "c16", "S7", "M8[us]"]
    records = [np.dtype([("a", "u1", (n,)), ("b", "f8")]) for n in range(1, 90)]

    def make(number):
        dtype = records[number % len(records)] if number % 2 else np.dtype(names[number % 6])
        with ringmem.empty(3, dtype if number % 3 else dtype.str, device=device) as buffer:
            assert buffer.itemsize == dtype.itemsize
            assert number % 3 == 0 or buffer.dtype == dtype

    assert hammer.repeat(make, make, make, make, seconds=0.4) == []


def test_copies_between_the_same_buffers_keep_them_alive(faulty, live_objects, hammer):
    device = ringmem.devices_of(faulty)[0]
    a, b = (ringmem.full(5000, 5, "i4", device=device) for _ in range(2))

    def there(number):
        a.copy_to(b)

    def back(number):
        b.copy_to(a)

    def fill(number):
        b.fill(5)

    def read(number):
        assert (a[number % 100 :].to_numpy() == 5).all()

    assert hammer.repeat(there, back, fill, read) == []
    assert _native.buffer_uses(a) == _native.buffer_uses(b) == 0
    a.close()
    b.close()
    assert set(live_objects(faulty)) <= {"pool"}
