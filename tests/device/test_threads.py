"""What belongs to a thread stays its own, and what there is one of is made once."""

import gc
import subprocess
import sys
import textwrap

import pytest

import ringmem
from ringmem.native import _native
from ringmem.pool import Pool


def test_the_current_stream_and_allocator_are_the_threads_own(device, hammer):
    def worker():
        pool, stream = Pool(device), device.create_stream()
        inner = device.create_stream()

        def work(number):
            assert ringmem.current_stream(device) is device.default_stream
            with stream, device.use(pool):
                assert ringmem.current_stream(device) is stream
                assert isinstance(device.current_allocator, _native.PoolAllocator)
                with inner, ringmem.empty(100, device=device) as buffer:
                    assert _native.buffer_stream(buffer)[1] is inner
                    assert pool.statistics().live == 1
                assert ringmem.current_stream(device) is stream
            assert not isinstance(device.current_allocator, _native.PoolAllocator)

        work.pool = pool
        return work

    workers = [worker() for _ in range(4)]
    assert hammer.repeat(*workers) == []
    for work in workers:
        assert work.pool.statistics().live == 0
        assert work.pool.statistics().allocations > 0


def test_a_device_has_one_default_stream(hammer):
    for _ in range(60):
        with ringmem.simulate(capacity="16 MiB") as simulation:
            device, found = simulation.devices[0], []
            ask = [lambda d=device, f=found: f.append(d.default_stream)] * 4
            assert hammer.together(*ask) == []
            assert len({id(stream) for stream in found}) == 1


def test_every_thread_finds_the_same_devices(hammer):
    for _ in range(30):
        driver, found = _native.HostDriver("devices=3,capacity=16MiB"), []
        ask = [lambda d=driver, f=found: f.append(ringmem.devices_of(d))] * 4
        assert hammer.together(*ask) == []
        assert len({tuple(map(id, devices)) for devices in found}) == 1


def test_simulations_of_several_threads_come_and_go(hammer):
    outside = ringmem.Device("cpu")

    def simulate(number):
        with ringmem.simulate(devices=2, capacity="16 MiB") as simulation:
            assert [d.name for d in simulation.devices] == ["cpu:0", "cpu:1"]
            with ringmem.zeros(10, "i4", device=simulation.devices[1]) as buffer:
                assert buffer.device is simulation.devices[1]

    def look(number):
        assert ringmem.Device("cpu").name == "cpu:0"
        assert ringmem.default_device().name in ("cpu:0", "cuda:0")
        assert {d.platform for d in ringmem.devices("cpu")} == {"cpu"}

    assert hammer.repeat(simulate, simulate, look, look) == []
    assert ringmem.Device("cpu") is outside
    assert ringmem.devices("cpu")[0] is outside


def test_streams_and_events_are_made_used_and_closed_by_all(faulty, hammer):
    device = ringmem.devices_of(faulty)[0]
    shared = device.create_stream()

    def work(number):
        stream = device.create_stream()
        event = stream.record(device.create_event(timing=True))
        shared.wait(event)
        shared.wait(stream)
        event.synchronize(timeout_s=10)
        assert event.query()
        stream.close()
        event.close()

    assert hammer.repeat(work, work, work, work, seconds=0.4) == []
    shared.synchronize(timeout_s=10)
    shared.close()
    shared = None  # with it goes the event behind its last work
    gc.collect()
    assert {kind: n for kind, n in faulty.live.items() if n} == {}


def test_a_stream_that_many_threads_close_is_destroyed_once(faulty, hammer):
    device = ringmem.devices_of(faulty)[0]
    for number in range(1, 40):
        stream = device.create_stream()
        assert hammer.together(*[stream.close] * 4) == []
        assert faulty.calls["stream_destroy"] == number


@pytest.mark.parametrize("threads", [2, 8])
def test_many_threads_are_the_first_to_use_the_library(threads):
    script = f"""
        import threading
        import ringmem

        barrier, found, failures = threading.Barrier({threads}), [], []

        def first(index):
            barrier.wait()
            try:
                orders = [
                    lambda: ringmem.Device("cpu"),
                    lambda: ringmem.devices("cpu")[0],
                    lambda: ringmem.default_device() and ringmem.Device("cpu:0"),
                    lambda: ringmem.zeros(3, "f4", device="cpu").device,
                ]
                device = orders[index % 4]()
                with ringmem.Pool(device) as pool, pool.empty(4, "i4") as buffer:
                    buffer.fill(index)
                    assert buffer.to_numpy().tolist() == [index] * 4
                found.append((id(device), id(device.default_stream), device))
                with ringmem.Ring("u8", 8) as ring, ring.producer() as p, ring.consumer() as c:
                    p.send([index])
                    assert c.recv().tolist() == [index]
            except BaseException as error:
                failures.append(repr(error))

        workers = [threading.Thread(target=first, args=(i,)) for i in range({threads})]
        [worker.start() for worker in workers]
        [worker.join(60) for worker in workers]
        assert not any(worker.is_alive() for worker in workers), "hangs"
        assert failures == [], failures
        assert len({{device for device, _, _ in found}}) == 1
        print(len(found), "ok")
    """
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, f"{threads} ok\n"), done.stderr
