"""Forks, threads, and the end of the interpreter."""

import os
import random
import signal
import subprocess
import sys
import threading

import pytest

import ringmem
from ringmem import PinnedPool, Pool

MIB = 1 << 20


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("make", [Pool, PinnedPool])
def test_a_forked_child_cannot_use_the_pool_and_harms_nothing(device, make):
    pool = make(device)
    block = pool.allocate(MIB)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pool.allocate(100)
        except ringmem.NotInitializedError as error:
            code = 0 if "forked" in str(error) and "'spawn'" in str(error) else 3
        except BaseException:
            code = 2
        del block
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    block.close()
    pool.allocate(MIB).close()
    pool.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_look_whatever_the_parents_threads_hold(device):
    """They allocate meanwhile: a lock may be held for ever in the child."""
    pool = Pool(device)
    stop = threading.Event()
    held = pool.allocate(MIB)

    def churn(stream):
        while not stop.is_set():
            pool.allocate(3 * MIB, stream).close()
            pool.allocate(100, stream).close()

    threads = [threading.Thread(target=churn, args=(device.create_stream(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout has a handler
                signal.alarm(20)
                code = 1
                try:
                    assert "Pool" in repr(pool)
                    assert pool.statistics().live == 0
                    assert pool.live_blocks() == []
                    pool.reset_peaks()
                    try:
                        pool.deallocate(held.ptr)
                    except ringmem.NotInitializedError:
                        code = 0
                except BaseException:
                    code = 2
                os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    held.close()
    pool.close()


@pytest.mark.parametrize("kind", ["Pool", "PinnedPool", "UnifiedPool", "NativePool"])
def test_the_interpreter_ends_quietly_with_live_blocks(kind):
    code = f"""
import ringmem
device = ringmem.Device("cpu")
pool = ringmem.{kind}(device)
stream = device.create_stream()
blocks = [pool.allocate(n, stream) for n in (100, 5000, 3 << 20)]
buffer = pool.empty(1000, "f4")
buffer.fill(1)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_on_streams_of_their_own_and_shared(device):
    pool = Pool(device, limit="128 MiB")
    streams = [device.create_stream() for _ in range(3)]
    failures = []

    def work(seed):
        rng = random.Random(seed)
        stream = streams[seed % 3]
        try:
            live = []
            for _ in range(1500):
                live.append(pool.allocate(int(2 ** rng.uniform(4, 19)), stream))
                if len(live) > 12:
                    live.pop(rng.randrange(len(live))).close(rng.choice(streams))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    s = pool.statistics()
    assert (s.live, s.allocations) == (0, 9000)
    assert pool.inconsistency() == ""
    pool.close()
