"""A kernel whose life several threads steer: nobody waits for the lock while another waits for the
kernel, and who waited is told what became of it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import handlers_for_tests as h
import pytest

import ringmem
from ringmem import ClosedError, InvalidValueError, KernelFailedError, RingKernel
from ringmem.ring import KernelState

DEADLINE_S = 10.0


def reached(state: KernelState, kernel: RingKernel) -> None:
    h.until(lambda: kernel.state is state)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def full(pool: ThreadPoolExecutor) -> Iterator[RingKernel]:  # closed before the pool, which joins
    """As many unread replies as a ring has slots, and a message more: a drain waits for a reader."""
    kernel = h.native_echo(capacity=4).start()
    kernel.send([h.message(i) for i in range(4)])
    h.until(lambda: kernel.telemetry().processed == 4)
    kernel.send([h.message(4)])
    yield kernel
    kernel.close()


@pytest.fixture
def draining(full: RingKernel, pool: ThreadPoolExecutor) -> tuple[RingKernel, Future[None]]:
    drain = pool.submit(full.drain)
    reached(KernelState.DRAINING, full)
    return full, drain


# --- a drain that waits ------------------------------------------------------------------------
def test_terminate_ends_a_drain_that_waits_in_another_thread(draining) -> None:
    kernel, drain = draining
    started = time.monotonic()
    kernel.terminate(timeout_s=1)
    assert time.monotonic() - started < 1
    with pytest.raises(ClosedError, match="another thread terminated the kernel"):
        drain.result(DEADLINE_S)
    assert kernel.state is KernelState.TERMINATED
    kernel.start()
    assert len(kernel.recv(4, timeout_s=1)) == 4
    assert [h.first(reply) for reply in kernel.recv(4, timeout_s=1)] == [13]


def test_close_ends_a_drain_that_waits_in_another_thread(draining) -> None:
    kernel, drain = draining
    kernel.close()
    with pytest.raises(ClosedError, match="another thread"):
        drain.result(DEADLINE_S)
    assert kernel.state is KernelState.CLOSED


def test_a_drain_that_waits_holds_up_no_other_request(draining) -> None:
    kernel, drain = draining
    started = time.monotonic()
    with pytest.raises(InvalidValueError, match="pause is not possible while the kernel is drain"):
        kernel.pause()
    with pytest.raises(InvalidValueError, match="resume is not possible while the kernel is drain"):
        kernel.resume()
    with pytest.raises(InvalidValueError, match="start is not possible while the kernel is drain"):
        kernel.start()
    with pytest.raises(InvalidValueError, match="the handler is using its state"):
        kernel.read_state()
    with pytest.raises(ringmem.TimeoutError, match="did not drain"):
        kernel.drain(timeout_s=0.05)
    assert time.monotonic() - started < 2
    kernel.recv(4, timeout_s=1)
    drain.result(DEADLINE_S)


def test_every_drain_returns_once_all_is_answered(draining, pool: ThreadPoolExecutor) -> None:
    kernel, drain = draining
    second = pool.submit(kernel.drain)
    kernel.recv(4, timeout_s=1)
    assert (drain.result(DEADLINE_S), second.result(DEADLINE_S)) == (None, None)
    assert kernel.state is KernelState.TERMINATED


def test_looking_at_a_draining_kernel_ends_no_ring_that_still_drains() -> None:
    with h.native_echo(capacity=4, rings=2) as kernel:
        kernel.send([h.message(i) for i in range(4)], ring=1)
        h.until(lambda: kernel.telemetry(1).processed == 4)
        kernel.send([h.message(4)], ring=1)
        with pytest.raises(ringmem.TimeoutError, match=r"rings \[1\] run"):
            kernel.drain(timeout_s=0.05)
        for _ in range(10):
            assert kernel.state is KernelState.DRAINING
        kernel.recv(4, timeout_s=1, ring=1)
        kernel.drain(timeout_s=DEADLINE_S)
        assert h.first(kernel.recv(4, timeout_s=1, ring=1)[0]) == 13


def test_interpreter_ends_while_a_thread_drains() -> None:
    done = h.run_script(
        """
import threading, time
import handlers_for_tests as h
kernel = h.native_echo(capacity=4).start()
kernel.send([h.message(i) for i in range(4)])
while kernel.telemetry().processed != 4: time.sleep(0.001)
kernel.send([h.message(4)])
threading.Thread(target=kernel.drain, daemon=True).start()
time.sleep(0.1)
print("end of main")
""",
        timeout=20,
    )
    assert (done.returncode, done.stdout) == (0, "end of main\n")


def test_forked_child_ends_while_a_thread_of_the_parent_drains(draining) -> None:
    kernel, _ = draining
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kernel.drain()
        except ClosedError:
            kernel.close()
            code = 7
        finally:
            os._exit(code)
    deadline = time.monotonic() + DEADLINE_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.005)
    assert os.waitstatus_to_exitcode(ended[1]) == 7
    assert kernel.state is KernelState.DRAINING


# --- a pause that waits ------------------------------------------------------------------------
@pytest.fixture
def pausing(pool: ThreadPoolExecutor) -> Iterator[tuple[RingKernel, Future[None]]]:
    """A pause that waits for a handler, which takes half a second."""
    with RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu") as kernel:
        kernel.send([(0, 5)])
        time.sleep(0.05)
        pause = pool.submit(kernel.pause)
        h.until(lambda: bool(kernel.control().should_pause))
        yield kernel, pause


def test_terminate_ends_a_pause_that_waits_in_another_thread(pausing) -> None:
    kernel, pause = pausing
    kernel.terminate()
    with pytest.raises(ClosedError, match="terminated the kernel while it was to pause"):
        pause.result(DEADLINE_S)


@pytest.mark.parametrize("request_", ["resume", "drain"])
def test_a_pause_that_another_thread_undoes_is_told_so(pausing, request_: str) -> None:
    kernel, pause = pausing
    getattr(kernel, request_)()
    with pytest.raises(InvalidValueError, match="another thread resumed or drained"):
        pause.result(DEADLINE_S)


def test_two_threads_pause_together(pausing) -> None:
    kernel, pause = pausing
    kernel.pause()
    pause.result(DEADLINE_S)
    assert kernel.state is KernelState.PAUSED


# --- a start that waits ------------------------------------------------------------------------
def test_terminate_ends_a_start_that_waits_in_another_thread(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h.native_echo() as kernel:
        kernel.terminate()
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "_has_started", lambda: False)  # a GPU that is busy
            start = pool.submit(kernel.start)
            reached(KernelState.LAUNCHED, kernel)
            kernel.terminate(timeout_s=1)
            with pytest.raises(ClosedError, match="terminated the kernel while it was to start"):
                start.result(DEADLINE_S)
        assert kernel.state is KernelState.TERMINATED
        kernel.start()
        assert h.first(kernel.call(h.message(1))) == 4


# --- an end that waits -------------------------------------------------------------------------
def test_a_kernel_is_not_terminated_before_every_ring_has_ended() -> None:
    with RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu", rings=2) as kernel:
        kernel.send([(0, 5)], ring=1)
        time.sleep(0.05)
        with pytest.raises(ringmem.TimeoutError):
            kernel.terminate(timeout_s=0.1)
        assert kernel.control(0).has_terminated
        assert kernel.state is KernelState.ACTIVE
        kernel.terminate()
        assert kernel.control(1).has_terminated


def test_every_terminate_and_close_returns(pool: ThreadPoolExecutor) -> None:
    kernel = RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu").start()
    kernel.send([(0, 3)])
    time.sleep(0.05)
    requests = (kernel.terminate, kernel.terminate, kernel.close, kernel.close)
    for future in [pool.submit(request) for request in requests]:
        with contextlib.suppress(ClosedError):  # terminate() came after close()
            future.result(DEADLINE_S)
    assert kernel.state is KernelState.CLOSED


def test_a_failed_kernel_whose_handler_never_returns_closes_without_its_memory() -> None:
    done = h.run_script(
        """
import os, time, numpy as np, ringmem
import handlers_for_tests as h
kernel = ringmem.RingKernel(h.endless, message=h.PAIR, reply=h.TOTAL, state=h.COUNTER,
                            device="cpu", rings=2, deadline_s=0.2).start()
kernel.send([(0, 1)], ring=1)
while kernel.state is not ringmem.ring.KernelState.FAILED: time.sleep(0.01)
try:
    kernel.start()
except ringmem.InvalidValueError as error:
    print(error)
try:
    kernel.close()
except ringmem.TimeoutError as error:
    print(error)
time.sleep(0.1)
print(kernel.state.value, flush=True)
os._exit(0)
"""
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("a handler of the last run has not returned")
    assert lines[1].startswith("a handler of the failed kernel does not return")
    assert lines[2] == "closed"


# --- everything together -----------------------------------------------------------------------
def test_any_requests_of_any_threads_leave_a_kernel_that_closes(pool: ThreadPoolExecutor) -> None:
    kernel = h.native_echo(capacity=4, rings=2).start()
    stop = threading.Event()

    def steer(seed: int) -> None:
        choose = random.Random(seed)
        messages = [  # of one thread at a time
            lambda: kernel.send([h.message(1)], 0.01, ring=1),
            lambda: kernel.recv(4, 0.01, ring=1),
        ]
        while not stop.is_set():
            with contextlib.suppress(InvalidValueError, ClosedError, ringmem.TimeoutError):
                choose.choice(
                    [
                        kernel.start,
                        lambda: kernel.pause(0.05),
                        kernel.resume,
                        lambda: kernel.drain(0.05),
                        kernel.terminate,
                        *messages[seed : seed + 1],
                    ]
                )()
            assert kernel.state is not KernelState.FAILED

    steering = [pool.submit(steer, seed) for seed in range(4)]
    time.sleep(1.0)
    stop.set()
    for future in steering:
        future.result(DEADLINE_S)
    kernel.terminate()
    kernel.start()
    kernel.close()
    assert kernel.state is KernelState.CLOSED


# --- a failure that nobody was told of ---------------------------------------------------------
def test_close_warns_of_a_failure_that_nobody_was_told_of() -> None:
    kernel = h.native_echo(deadline_s=0.05).start()
    h.until(lambda: bool(kernel.control().has_terminated))
    with pytest.warns(RuntimeWarning, match=r"nobody was told: ring 0 ended itself") as warned:
        kernel.close()
        kernel.close()
    assert len(warned) == 1


@pytest.mark.filterwarnings("error")
def test_close_warns_of_no_failure_that_was_raised_or_looked_at() -> None:
    with h.native_echo(deadline_s=0.05) as kernel:
        h.until(lambda: bool(kernel.control().has_terminated))
        with pytest.raises(KernelFailedError):
            kernel.call(h.message(1), timeout_s=1)
    with h.native_echo(deadline_s=0.05) as kernel:
        reached(KernelState.FAILED, kernel)


def test_a_kernel_that_was_ended_by_force_warns_of_nothing() -> None:
    kernel = RingKernel(
        h.endless, message=h.PAIR, reply=h.TOTAL, state=h.COUNTER, device="cpu", isolated=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with kernel:
            with pytest.raises(ringmem.TimeoutError):
                kernel.call((0, 1), timeout_s=0.2)
            kernel.terminate(0.1, force=True)


# --- a process that stands still ---------------------------------------------------------------
def test_a_kernel_outlives_a_stop_of_its_process() -> None:
    source = """
import time
import handlers_for_tests as h
with h.native_echo(heartbeat_timeout_s=0.3) as kernel:
    kernel.call(h.message(1))
    print("up", flush=True)
    input()
    time.sleep(0.2)
    print(h.first(kernel.call(h.message(1))))
"""
    child = h.open_script(source)
    try:
        assert child.stdout.readline() == "up\n"
        for _ in range(2):
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.6)
            child.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        assert child.communicate("\n", timeout=20)[0] == "4\n"
    finally:
        child.kill()
