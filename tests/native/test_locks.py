"""What a forked child inherits is not locked, whoever held it in the parent."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ringmem
from ringmem.native.locks import Lock

SOURCES = Path(ringmem.__file__).parent

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def child_does(action: Callable[[], object], seconds: int = 20) -> bool:
    """Whether a forked child comes to the end of `action`."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout has a handler
        signal.alarm(seconds)
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.fixture
def held():
    """A lock that another thread of this process holds."""
    lock, taken, done = Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(10)
    yield lock
    done.set()
    thread.join()


def enter(lock: Lock) -> None:
    with lock, lock:  # a finalizer may come in between
        pass


def test_a_forked_child_finds_a_lock_open_that_a_thread_of_the_parent_holds(held):
    assert child_does(lambda: enter(held))
    assert child_does(lambda: child_does(lambda: enter(held)) or os._exit(3))


def test_in_one_process_a_second_thread_waits(held):
    entered = threading.Event()
    second = threading.Thread(target=lambda: (enter(held), entered.set()), daemon=True)
    second.start()
    assert not entered.wait(0.05)


def test_two_threads_of_a_child_exclude_each_other(held):
    def count() -> None:
        inside, most = 0, 0

        def work() -> None:
            nonlocal inside, most
            for _ in range(200):
                with held:
                    inside += 1
                    time.sleep(0)
                    most = max(most, inside)
                    inside -= 1

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert most == 1

    assert child_does(count)


def test_no_lock_of_the_package_is_of_another_kind():
    plain = re.compile(r"\bthreading\.(R?Lock|Condition|Semaphore)\b")
    found = [
        f"{file.relative_to(SOURCES)}: {line.strip()}"
        for file in SOURCES.rglob("*.py")
        if file != SOURCES / "native" / "locks.py"
        for line in file.read_text(encoding="utf-8").splitlines()
        if plain.search(line)
    ]
    assert found == []


def test_a_child_may_look_at_a_pool_while_a_thread_of_the_parent_does():
    pool = ringmem.Pool("cpu")
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            pool.statistics()
            pool.reset_peaks()

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all(child_does(pool.statistics) for _ in range(20))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    pool.close()


def test_a_signal_in_the_middle_leaves_no_lock_behind():
    class Interrupted(Exception):
        pass

    armed = False

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    def take_and_let_go() -> None:
        nonlocal armed
        armed = True
        for _ in range(1000):
            with lock:
                pass
        armed = False

    lock = Lock()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(2000):
            signal.setitimer(signal.ITIMER_REAL, 20e-6)
            with contextlib.suppress(Interrupted):
                take_and_let_go()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    taken = []
    other = threading.Thread(target=lambda: taken.append(lock.acquire(timeout=5)))
    other.start()
    other.join()
    assert taken == [True]
